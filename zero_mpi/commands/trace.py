"""`zero-mpi trace FILE`: prints how each rank spent its time, from a file written by `train --trace`.

Each moment of a step counts for the first entry of `CLAIMS` that is in progress, so the columns of a rank add
up to the step. Computing takes precedence over waiting: on a GPU the host may wait for a transfer while the
device computes, and then the transfer is hidden. A transfer that the rank does not wait for is hidden too.
"""

import gzip
import os
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from zero_mpi.cli.parser import Parser
from zero_mpi.cli.text import plural, write
from zero_mpi.errors import FileError, UsageError
from zero_mpi.files.foreign import LONGEST, shown
from zero_mpi.files.open import open_file
from zero_mpi.files.parse import parse_json
from zero_mpi.files.text_streams import FREE_BYTES, MOST_RATIO
from zero_mpi.launch.world import World, run
from zero_mpi.telemetry import spans
from zero_mpi.train.timeline import FAMILIES, FIRST

EXPOSED, HIDDEN, OTHER, MOVING = "exposed", "hidden", "other", "moving"
# A column, with the track and the kinds of events that count for it (no kinds: all of the track).
CLAIMS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("evaluation", spans.STEPS, ("evaluation",)),
    ("checkpoint", spans.CHECKPOINT, ()),
    ("compute", spans.COMPUTE, ()),
    ("optimizer", spans.OPTIMIZER, ("update",)),
    (EXPOSED, spans.WAITS, ()),
    (EXPOSED, spans.STALLS, ()),
    ("optimizer", spans.OPTIMIZER, ()),
    (MOVING, spans.BETWEEN, ()),
    ("data", spans.DATA, ()),
)
COLUMNS = ("compute", EXPOSED, MOVING, "optimizer", "data", "evaluation", "checkpoint", OTHER)
STEP, FLIGHT = len(CLAIMS), len(CLAIMS) + 1  # indices of steps and transfers, which follow CLAIMS
PLACES = {(track, kind): place for place, (_, track, kinds) in enumerate(CLAIMS) for kind in kinds or ("",)}
PLACES |= {(spans.STEPS, "step"): STEP} | {(family, ""): FLIGHT for family in FAMILIES}
MEANING = (
    "exposed: waiting for transfers and other ranks; hidden: transfers while the rank does not wait;",
    "moving: work for transfers between stages, without waiting; sent: bytes sent to other ranks",
)
MOST_OF_RANK = 4 * spans.MAX_SPANS  # events; a run stops recording at a quarter of this number
MOST_RANKS, MOST = 1 << 20, 1 << 62
LATEST = 1e15  # microseconds: 31 years
LONGEST_NAME = 100
GZIP = b"\x1f\x8b"
MOST_LINE = 1 << 16  # maximum bytes in the line of an event


# ---------------------------------------------------------------------------------------------- the file


class Slice(NamedTuple):
    """Event of a rank, with times in microseconds of a common clock."""

    family: str  # track, or kind of transfer
    begun: float
    ended: float
    kind: str  # "forward", "allgather", ...
    step: int  # number of the step, from 1
    nbytes: int  # bytes of a transfer


@dataclass(frozen=True)
class Timeline:
    """Content of a file: the events of each rank, in rank order, and other data."""

    path: Path
    ranks: dict[int, list[Slice]]
    facts: dict[str, Any]

    @property
    def steps(self) -> list[int]:
        """Numbers of the steps that every rank has completed."""
        per_rank = [
            {event.step for event in slices if (event.family, event.kind) == (spans.STEPS, "step")}
            for slices in self.ranks.values()
        ]
        return sorted(set.intersection(*per_rank)) if per_rank else []


def read(path: Path) -> Timeline:
    """Return the timeline in a file, compressed or not. Raise UsageError for any other file."""
    try:
        lines, ranks = lines_of(path), dict[int, list[Slice]]()
        head = parse_json(next(lines, b"").rstrip(b",\r\n") + b"}", null_for_infinite=True)
        facts = head["otherData"]
        if "zero_mpi" not in facts or next(lines, b"") != b'"traceEvents":[\n':
            raise ValueError("it does not start like a timeline")
        for line in lines:
            if line.startswith(b"]"):
                break
            take(parse_json(line.rstrip(b",\r\n")), ranks)
        else:
            raise ValueError("it ends too early")
        timeline = Timeline(path, dict(sorted(ranks.items())), facts)
        if not timeline.steps:
            raise ValueError("no step was completed on all ranks; trace again, maybe with fewer steps")
    except FileError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        reason = shown(str(error), LONGEST)
        raise UsageError(f"{shown(path)}: not a complete timeline of --trace: {reason}") from None
    return timeline


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, one for each event. The file may be compressed; memory is bounded."""
    with open_file(path, "a timeline") as raw:
        is_packed = os.pread(raw.fileno(), 2, 0) == GZIP
        bytes_left = max(FREE_BYTES, MOST_RATIO * os.fstat(raw.fileno()).st_size)
        file = gzip.GzipFile(fileobj=raw) if is_packed else raw
        while line := file.readline(MOST_LINE):
            bytes_left -= len(line)
            if bytes_left < 0:
                raise ValueError(f"it unpacks to more than {MOST_RATIO} times its size")
            if not line.endswith(b"\n"):
                raise ValueError("it has an unfinished line")
            yield line


def take(event: Any, ranks: dict[int, list[Slice]]) -> None:
    """Add an event to the events of its rank. Raise ValueError or another error if it is invalid."""
    slices = ranks.setdefault(within(event["pid"], 0, MOST_RANKS) - FIRST, [])
    if event["ph"] != "X":
        return  # metadata, such as the name of a rank or a track
    if len(slices) >= MOST_OF_RANK:
        raise ValueError(f"more than {MOST_OF_RANK} events of one rank")
    fields, begun = event["args"], float(within(event["ts"], -LATEST, LATEST))
    family, kind = (  # equal texts are stored once
        sys.intern(shown(text, LONGEST_NAME)) for text in (event["cat"], fields.get("kind", ""))
    )
    ended = begun + within(event["dur"], 0, LATEST)
    step, nbytes = within(fields["step"], 0, MOST), within(fields.get("bytes", 0), 0, MOST)
    slices.append(Slice(family, begun, ended, kind, step, nbytes))


def within(value: Any, least: float, most: float) -> Any:
    """Return `value` if it is a number from `least` to `most`, else raise ValueError."""
    if isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"an event has the invalid number {shown(value, LONGEST_NAME)}")
    return value


@dataclass
class Share:
    """Time that a rank spent in its steps, in microseconds."""

    rank: int
    steps: dict[int, float] = field(default_factory=dict)  # length of each step
    columns: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COLUMNS, 0.0))  # sum: `steps`
    hidden: float = 0.0  # time in which transfers were in progress and the rank did not wait
    sent: int = 0  # bytes sent to other ranks


def shares(timeline: Timeline) -> list[Share]:
    """Return the times of every rank in the steps that all ranks have completed."""
    steps = set(timeline.steps)
    return [share_of(rank, slices, steps) for rank, slices in timeline.ranks.items()]


def share_of(rank: int, slices: Iterable[Slice], steps: set[int]) -> Share:
    """Return a rank's times, from the starts and ends of its events in order of time."""
    share, marks = Share(rank), list[tuple[float, int, int]]()
    for event in slices:
        place = PLACES.get((event.family, event.kind), PLACES.get((event.family, "")))
        if place is None or (place == STEP and event.step not in steps):
            continue
        if place == STEP:
            share.steps[event.step] = event.ended - event.begun
        elif place == FLIGHT and event.step in steps:
            share.sent += event.nbytes
        if event.ended > event.begun:
            marks += [(event.begun, 1, place), (event.ended, 0, place)]
    active = [0] * (FLIGHT + 1)  # number of events in progress, by index
    before = 0.0
    for now, begins, place in sorted(marks):  # at equal times ends come first
        if active[STEP]:
            account(share, active, now - before)
        before = now
        active[place] += 1 if begins else -1
    return share


def account(share: Share, active: Sequence[int], time: float) -> None:
    """Add a time segment to the column of the first active claim, and to `hidden` if it hides a transfer."""
    column = next((name for (name, *_), count in zip(CLAIMS, active, strict=False) if count), OTHER)
    share.columns[column] += time
    if column != EXPOSED and active[FLIGHT]:
        share.hidden += time


def table(timeline: Timeline) -> Iterator[str]:
    """Yield the lines about a timeline: a row for each rank, the meaning of columns, and the clock error."""
    ranks, steps = shares(timeline), timeline.steps
    heading = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    heading += f" of {plural(len(ranks), 'rank')}"
    yield f"{shown(timeline.path)}: {heading}, zero_mpi {shown(timeline.facts['zero_mpi'], 40)}"
    yield "milliseconds per step, and share of the step"
    columns = [name for name in COLUMNS if name == OTHER or any(share.columns[name] for share in ranks)]
    names = "".join(f" {name:>15}" for name in columns)
    yield from ("", f"{'rank':>4} {'step':>10}{names} {HIDDEN:>10} {'sent MB':>9}")
    yield from (row(share, columns) for share in ranks)
    yield from ("", *MEANING)
    clock_error, end_step = timeline.facts.get("clock_error_us"), timeline.facts.get("ends_in")
    if isinstance(clock_error, int | float) and 0 < clock_error <= LATEST:
        yield f"clocks of different hosts agree within {clock_error:.0f} us"
    if end_step is not None:
        yield f"recording ended in step {shown(end_step, 40)}: there were too many events"


def row(share: Share, columns: Sequence[str]) -> str:
    """Return the line of the table for one rank."""
    count, total = len(share.steps), sum(share.steps.values())
    cells = ""
    for name in columns:
        time = share.columns[name]
        cells += f" {time / count / 1e3:>10.3f} " + (f"{100 * time / total:3.0f}%" if total else "  - ")
    start = f"{share.rank:>4} {total / count / 1e3:>10.3f}"
    return f"{start}{cells} {share.hidden / count / 1e3:>10.3f} {share.sent / count / 1e6:>9.2f}"


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="zero-mpi trace",
        description="Summarize where the time of each rank went, from a timeline of zero_mpi.train --trace. "
        "To view the timeline, open the file at ui.perfetto.dev (it is not uploaded) or in chrome://tracing.",
    )
    parser.add_argument("file", metavar="FILE", help="timeline written by --trace, .json or .json.gz")
    return parser


def command(world: World, arguments: Sequence[str]) -> int:
    write(table(read(Path(make_parser().parse_args(arguments).file))))
    return 0


main = partial(run, "trace", command, alone=True)
