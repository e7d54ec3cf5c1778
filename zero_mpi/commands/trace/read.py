"""Reader of a timeline's file: the activity of each rank, in microseconds of one clock.

A file of zero_mpi has one event on each line, so it is read line by line in bounded memory.
"""

from __future__ import annotations

import gzip
import os
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from zero_mpi.errors import FileError, UsageError
from zero_mpi.files.foreign import LONGEST, shown
from zero_mpi.files.open import open_file
from zero_mpi.files.parse import parse_json
from zero_mpi.telemetry.spans import MAX_SPANS, STEPS
from zero_mpi.train.timeline import FIRST

MOST_OF_RANK = 4 * MAX_SPANS  # events; a rank records a quarter of that, and what one micro-batch adds
MOST_RANKS, MOST = 1 << 20, 1 << 62
LATEST = 1e15  # microseconds: 31 years
LONGEST_NAME = 100
GZIP = b"\x1f\x8b"
MOST_LINE = 1 << 16  # most bytes of an event
DENSEST, ALWAYS = 50, 8 << 20  # most bytes of an unpacked file: per byte of the packed one; in any case


class Slice(NamedTuple):
    """Event of a rank."""

    family: str  # its track, or the kind of transfer
    name: str
    begun: float
    ended: float
    kind: str  # "forward", "allgather", ...
    unit: str  # the unit or stage that it is about, or nothing
    step: int  # from 1
    nbytes: int  # of a transfer


@dataclass(frozen=True)
class Recorded:
    """Contents of a file: the events of each rank in rank order, and what it says beside them."""

    path: Path
    ranks: dict[int, list[Slice]]
    about: dict[str, Any]

    @property
    def steps(self) -> list[int]:
        """Steps that are complete on every rank."""
        per_rank = [
            {each.step for each in slices if (each.family, each.kind) == (STEPS, "step")}
            for slices in self.ranks.values()
        ]
        return sorted(set.intersection(*per_rank)) if per_rank else []


def read(path: Path) -> Recorded:
    """Read the timeline in a file, compressed or not. Raises UsageError for other files."""
    try:
        return recorded(path)
    except FileError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        why = shown(str(error), LONGEST)
        raise UsageError(f"{shown(path)}: not a complete timeline of --trace: {why}") from None


def recorded(path: Path) -> Recorded:
    """Read as `read` does, but raise any error as it is."""
    lines, ranks = lines_of(path), dict[int, list[Slice]]()
    head = parse_json(next(lines, b"").rstrip(b",\r\n") + b"}", null_for_infinite=True)
    about = head.get("otherData") if isinstance(head, dict) else None
    if not (isinstance(about, dict) and "zero_mpi" in about and next(lines, b"") == b'"traceEvents":[\n'):
        raise ValueError("it does not start like one")
    for line in lines:
        if line.startswith(b"]"):
            break
        take(parse_json(line.rstrip(b",\r\n")), ranks)
    else:
        raise ValueError("it ends too early")
    found = Recorded(path, dict(sorted(ranks.items())), about)
    if not found.steps:
        raise ValueError(
            "no step was completed on all ranks; trace again, with fewer steps if there were many"
        )
    return found


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, decompressed if needed."""
    with open_file(path, "a time line") as raw:
        is_packed = os.pread(raw.fileno(), 2, 0) == GZIP
        left = max(ALWAYS, DENSEST * os.fstat(raw.fileno()).st_size)
        file = gzip.GzipFile(fileobj=raw) if is_packed else raw
        while line := file.readline(MOST_LINE):
            left -= len(line)
            if left < 0:
                raise ValueError(f"it unpacks to more than {DENSEST} times its size")
            if not line.endswith(b"\n"):
                raise ValueError("it has an unfinished line")
            yield line


def take(event: Any, ranks: dict[int, list[Slice]]) -> None:
    """Add an event to those of its rank. Raises any error for one that no trace has."""
    slices = ranks.setdefault(within(event["pid"], 0, MOST_RANKS) - FIRST, [])
    if event["ph"] != "X":
        return  # metadata: the name of a rank or track
    if len(slices) >= MOST_OF_RANK:
        raise ValueError(f"more than {MOST_OF_RANK} events of one rank")
    about, begun = event["args"], float(within(event["ts"], -LATEST, LATEST))
    slices.append(
        Slice(
            family=text(event["cat"]),
            name=text(event["name"]),
            begun=begun,
            ended=begun + within(event["dur"], 0, LATEST),
            kind=text(about.get("kind", "")),
            unit=text(about.get("unit", "")),
            step=within(about["step"], 0, MOST),
            nbytes=within(about.get("bytes", 0), 0, MOST),
        )
    )


def within(value: Any, least: float, most: float) -> Any:
    """Return a number between bounds; ValueError for another one."""
    if isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"an event has the number {shown(value, LONGEST_NAME)}")
    return value


def text(value: Any) -> str:
    """Return a short text, stored once however often it occurs."""
    return sys.intern(shown(value, LONGEST_NAME))
