"""A time line read back from its file: what each rank did when, in microseconds of one clock.

A file of ours has one event on each line, so it is read line by line in bounded memory.
"""

from __future__ import annotations

import gzip
import os
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from zero_mpi.errors import FileError, UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import open_file
from zero_mpi.files.parse import parse_json
from zero_mpi.telemetry.spans import MAX_SPANS, STEPS
from zero_mpi.train.trace_events import FIRST

MOST_OF_RANK = 4 * MAX_SPANS  # events; a rank records a quarter of that, and what one micro-batch adds
MOST_RANKS, MOST_STEPS, MOST_BYTES = 1 << 20, 1 << 52, 1 << 62
LATEST = 1e15  # microseconds: 31 years
LONGEST_NAME = 100
GZIP = b"\x1f\x8b"
MOST_LINE = 1 << 16  # bytes of an event
DENSEST, ALWAYS = 50, 8 << 20  # bytes that a packed file may unpack to: for each of its own; in any case


class BrokenError(ValueError):
    """A file is no time line that can be read, for a reason that says all."""


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
        per_rank = [
            {each.step for each in lane.slices if (each.family, each.kind) == (STEPS, "step")}
            for lane in self.ranks
        ]
        return sorted(set.intersection(*per_rank)) if per_rank else []


def read(path: Path) -> Recorded:
    """The time line in a file, compressed or not. Raises UsageError for what is none of ours."""
    try:
        return recorded(path)
    except FileError:
        raise
    except BrokenError as error:
        raise UsageError(f"{shown(path)}: {error}") from None
    except ValueError as error:
        raise UsageError(f"{shown(path)}: not a trace: {error}; expected a file of --trace") from None


def recorded(path: Path) -> Recorded:
    """Read as `read` does; BrokenError for a file that shows what it is, ValueError for any other."""
    lines = lines_of(path)
    head = parse_json(next(lines, b"").rstrip(b",\r\n") + b"}", null_for_infinite=True)
    about = head.get("otherData") if isinstance(head, dict) else None
    if (
        not isinstance(about, dict)
        or "zero_mpi" not in about
        or next(lines, b"").strip() != b'"traceEvents":['
    ):
        raise ValueError("it does not begin as one")
    lanes: dict[int, Lane] = {}
    for line in lines:
        if line.startswith(b"]"):
            break
        take(parse_json(line.rstrip(b",\r\n")), lanes)
    else:
        raise BrokenError("broken: it ends too early")
    found = Recorded(path, [lanes[rank] for rank in sorted(lanes)], about)
    if not found.steps:
        raise BrokenError("has no step that is whole; trace again, fewer steps if there were too many")
    return found


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, unpacked where it is packed; FileError, BrokenError, ValueError."""
    with open_file(path, "a time line") as raw:
        is_packed = os.pread(raw.fileno(), 2, 0) == GZIP
        left = max(ALWAYS, DENSEST * os.fstat(raw.fileno()).st_size)
        try:
            file = gzip.GzipFile(fileobj=raw) if is_packed else raw
            while line := file.readline(MOST_LINE):
                left -= len(line)
                if left < 0:
                    raise BrokenError(f"broken, it unpacks to more than {DENSEST} times its size")
                if not line.endswith(b"\n"):
                    raise ValueError("a line without an end")
                yield line
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise BrokenError(f"broken, it cannot be unpacked: {error}") from None


def take(event: Any, lanes: dict[int, Lane]) -> None:
    """Add an event to the lane of its rank."""
    about = event.get("args", {}) if isinstance(event, dict) else None
    if not isinstance(about, dict):
        raise lacking("no object")
    rank = number(event, "pid", int, 0, MOST_RANKS) - FIRST
    lane = lanes.setdefault(rank, Lane(rank))
    if event.get("ph") == "X":
        if len(lane.slices) >= MOST_OF_RANK:
            raise lacking(f"more than {MOST_OF_RANK} of one rank")
        begun = float(number(event, "ts", int | float, -LATEST, LATEST))
        lane.slices.append(
            Slice(
                family=name_of(event, "cat"),
                name=name_of(event, "name"),
                begun=begun,
                ended=begun + number(event, "dur", int | float, 0, LATEST),
                kind=name_of(about, "kind", ""),
                unit=name_of(about, "unit", ""),
                step=number(about, "step", int, 0, MOST_STEPS),
                nbytes=number(about, "bytes", int, 0, MOST_BYTES, 0),
            )
        )
    elif event.get("name") == "process_name":
        lane.name = name_of(about, "name")


def number(
    of: dict[str, Any], name: str, kind: Any, least: float, most: float, default: int | None = None
) -> Any:
    """The number of a kind under a name; BrokenError for one that cannot be."""
    value = of.get(name, default)
    if isinstance(value, kind) and not isinstance(value, bool) and least <= value <= most:
        return value
    raise lacking(f"{name} is {shown(value, LONGEST_NAME)}")


def name_of(of: dict[str, Any], name: str, default: str | None = None) -> str:
    """A short text, kept once however often it comes."""
    value = of.get(name, default)
    if isinstance(value, str):
        return sys.intern(shown(value, LONGEST_NAME))
    raise lacking(f"{name} is {shown(value, LONGEST_NAME)}")


def lacking(what: str) -> BrokenError:
    """The error for an event that none of our traces has."""
    return BrokenError(f"broken: an event lacks what it should have ({what})")
