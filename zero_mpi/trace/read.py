"""A time line read back from its file: what each rank did when, in microseconds of one clock."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from zero_mpi.errors import UsageError
from zero_mpi.spans import STEPS
from zero_mpi.trace.events import FIRST

GZIP = b"\x1f\x8b"


class Slice(NamedTuple):
    """One event: `family` is its track, or what kind of transfer it is."""

    family: str
    name: str
    begun: float
    ended: float
    about: dict[str, Any]

    @property
    def kind(self) -> str:
        """What it is: "forward", "update", "allgather", ..."""
        return str(self.about.get("kind", ""))

    @property
    def unit(self) -> str:
        """The unit or stage that it is about, or nothing."""
        return str(self.about.get("unit", ""))

    @property
    def step(self) -> int:
        """Of the training, from 1."""
        return int(self.about["step"])


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
    found = parse(path)
    about, events = found.get("otherData"), found.get("traceEvents")
    if not isinstance(events, list):
        raise UsageError(f"{path}: not a trace: it has no traceEvents; expected a file of --trace")
    if not isinstance(about, dict) or "zero_mpi" not in about:
        raise UsageError(f"{path}: a trace of another program; expected a file of --trace")
    lanes: dict[int, Lane] = {}
    try:
        for event in events:
            take(event, lanes)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path}: broken: an event lacks what it should have ({error!r})") from error
    recorded = Recorded(path, [lanes[rank] for rank in sorted(lanes)], about)
    if not recorded.steps:
        raise UsageError(
            f"{path}: has no step that is whole; trace again, fewer steps if there were too many"
        )
    return recorded


def parse(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises UsageError."""
    try:
        data = path.read_bytes()
        found = json.loads(gzip.decompress(data) if data.startswith(GZIP) else data)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not a trace: {error}; expected a file of --trace") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"{path}: broken, it cannot be unpacked: {error}") from error
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except RecursionError as error:
        raise UsageError(f"{path}: not a trace: nested too deeply") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path}: not a trace: it has no traceEvents; expected a file of --trace")
    return found


def take(event: Any, lanes: dict[int, Lane]) -> None:
    """Add an event to the lane of its rank."""
    rank = int(event["pid"]) - FIRST
    lane = lanes.setdefault(rank, Lane(rank))
    if event["ph"] == "X":
        begun, lasted = float(event["ts"]), float(event["dur"])
        if not (math.isfinite(begun) and 0 <= lasted < math.inf):
            raise ValueError(f"a time of {begun} and {lasted}")
        int(event["args"]["step"])  # which every event has
        lane.slices.append(
            Slice(str(event["cat"]), str(event["name"]), begun, begun + lasted, dict(event["args"]))
        )
    elif event["name"] == "process_name":
        lane.name = str(event["args"]["name"])
