"""A time line read back from its file: what each rank did when, in microseconds of one clock."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from zero_mpi.errors import FileError, UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.telemetry.spans import MAX_SPANS, STEPS
from zero_mpi.trace.stream import PackingError, members
from zero_mpi.trace.trace_events import FIRST

MOST_OF_RANK = 4 * MAX_SPANS  # events; a rank records a quarter of that, and what one micro-batch adds
MOST_RANKS, MOST_STEPS, MOST_BYTES = 1 << 20, 1 << 52, 1 << 62
LATEST = 1e15  # microseconds: 31 years
LONGEST_NAME = 100


class Slice(NamedTuple):
    """One event: `family` is its track, or what kind of transfer it is.

    kind    what it is: "forward", "update", "allgather", ...
    unit    the unit or stage that it is about, or nothing
    step    of the training, from 1
    nbytes  of a transfer
    """

    family: str
    name: str
    begun: float
    ended: float
    kind: str
    unit: str
    step: int
    nbytes: int


@dataclass
class Lane:
    """What a rank did; `name` says where it was."""

    rank: int
    name: str = ""
    slices: list[Slice] = field(default_factory=list)


@dataclass(frozen=True)
class Recorded:
    """A file: its ranks in order, and what it says beside their events."""

    path: Path
    ranks: list[Lane]
    about: dict[str, Any]

    @property
    def steps(self) -> list[int]:
        """Those that are whole on every rank."""
        per_rank = [{each.step for each in lane.slices if is_step(each)} for lane in self.ranks]
        return sorted(set.intersection(*per_rank)) if per_rank else []


def is_step(each: Slice) -> bool:
    """Whether an event is a step of the training."""
    return each.family == STEPS and each.kind == "step"


def read(path: Path) -> Recorded:
    """The time line in a file, compressed or not. Raises UsageError for what is none of ours."""
    lanes: dict[int, Lane] = {}
    about: Any = None
    has_events = False
    try:
        for name, value in members(path):
            if name == "traceEvents" and isinstance(value, Iterator):
                has_events = True
                for event in value:
                    take(event, lanes)
            elif name == "otherData":
                about = value
    except FileError:
        raise
    except PackingError as error:
        raise UsageError(f"{shown(path)}: broken, {error}") from None
    except EventError as error:
        raise UsageError(f"{shown(path)}: broken: an event lacks what it should have ({error})") from None
    except ValueError as error:
        raise UsageError(f"{shown(path)}: not a trace: {error}; expected a file of --trace") from None
    return checked(path, lanes, about, has_events)


def checked(path: Path, lanes: dict[int, Lane], about: Any, has_events: bool) -> Recorded:
    """What was read, if it is a time line of ours; else UsageError."""
    if not has_events:
        raise UsageError(f"{shown(path)}: not a trace: it has no traceEvents; expected a file of --trace")
    if not isinstance(about, dict) or "zero_mpi" not in about:
        raise UsageError(f"{shown(path)}: a trace of another program; expected a file of --trace")
    recorded = Recorded(path, [lanes[rank] for rank in sorted(lanes)], about)
    if not recorded.steps:
        raise UsageError(
            f"{shown(path)}: has no step that is whole; trace again, fewer steps if there were too many"
        )
    return recorded


class EventError(ValueError):
    """An event that none of our traces has."""


def take(event: Any, lanes: dict[int, Lane]) -> None:
    """Add an event to the lane of its rank."""
    about = entry(event, "args", dict, {})
    rank = whole(entry(event, "pid", int), MOST_RANKS) - FIRST
    lane = lanes.setdefault(rank, Lane(rank))
    if event.get("ph") == "X":
        if len(lane.slices) >= MOST_OF_RANK:
            raise EventError(f"more than {MOST_OF_RANK} of one rank")
        begun, lasted = (time_of(event, name) for name in ("ts", "dur"))
        if lasted < 0:
            raise EventError(f"a time of {lasted}")
        lane.slices.append(
            Slice(
                name_of(event, "cat"),
                name_of(event, "name"),
                begun,
                begun + lasted,
                name_of(about, "kind", ""),
                name_of(about, "unit", ""),
                whole(entry(about, "step", int), MOST_STEPS),
                whole(entry(about, "bytes", int, 0), MOST_BYTES),
            )
        )
    elif event.get("name") == "process_name":
        lane.name = name_of(about, "name")


def entry(of: Any, name: str, kind: type, default: Any = None) -> Any:
    """The value of a kind under a name; EventError for another."""
    value = of.get(name, default) if isinstance(of, dict) else None
    if isinstance(value, kind) and not isinstance(value, bool):
        return value
    raise EventError(f"{name} is {shown(value, LONGEST_NAME)}" if isinstance(of, dict) else "no object")


def whole(value: int, most: int) -> int:
    """A count that can be."""
    if not 0 <= value <= most:
        raise EventError(f"a count of {shown(value, LONGEST_NAME)}")
    return value


def time_of(event: Any, name: str) -> float:
    """Microseconds."""
    value = event.get(name)
    if isinstance(value, int | float) and abs(value) <= LATEST:
        return float(value)
    raise EventError(f"{name} is {shown(value, LONGEST_NAME)}")


def name_of(of: Any, name: str, default: str | None = None) -> str:
    """A short text, kept once however often it comes."""
    return sys.intern(shown(entry(of, name, str, default), LONGEST_NAME))
