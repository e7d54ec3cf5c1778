"""Command `trace`: computes where the time of each rank went, and prints it.

Each moment of a step belongs to the first of `CLAIMS` that is in progress, so the columns of a rank add up to
the step. Computing takes precedence over waiting: on a GPU the host may wait for a transfer while the device
computes, and such a transfer is hidden. Transfers in progress while nobody waits for them are hidden too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from zero_mpi.cli.parser import Parser
from zero_mpi.cli.text import plural, write
from zero_mpi.commands.trace.read import LATEST, Recorded, Slice, read
from zero_mpi.files.foreign import shown
from zero_mpi.launch.world import World, run
from zero_mpi.telemetry.spans import BETWEEN, CHECKPOINT, COMPUTE, DATA, OPTIMIZER, STALLS, STEPS, WAITS
from zero_mpi.train.timeline import FAMILIES

EXPOSED, HIDDEN, OTHER, MOVING = "exposed", "hidden", "other", "moving"
# Column, track, kinds (all if none are named); the first that is in progress gets the moment.
CLAIMS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("evaluation", STEPS, ("evaluation",)),
    ("checkpoint", CHECKPOINT, ()),
    ("compute", COMPUTE, ()),
    ("optimizer", OPTIMIZER, ("update",)),
    (EXPOSED, WAITS, ()),
    (EXPOSED, STALLS, ()),
    ("optimizer", OPTIMIZER, ()),
    (MOVING, BETWEEN, ()),
    ("data", DATA, ()),
)
COLUMNS = ("compute", EXPOSED, MOVING, "optimizer", "data", "evaluation", "checkpoint", OTHER)
STEP, FLIGHT = len(CLAIMS), len(CLAIMS) + 1  # beside the claims: steps, and transfers in progress
PLACES = {(track, kind): place for place, (_, track, kinds) in enumerate(CLAIMS) for kind in kinds or ("",)}
PLACES |= {(STEPS, "step"): STEP} | {(family, ""): FLIGHT for family in FAMILIES}
UNITS = 5  # number of longest-awaited units that are shown
MEANING = (
    "exposed: waiting for transfers and other ranks; hidden: transfers during computation;",
    "moving: work for transfers between stages, without waiting; sent: bytes sent to other ranks",
)


@dataclass
class Share:
    """Time of a rank in its steps, in microseconds."""

    rank: int
    steps: dict[int, float] = field(default_factory=dict)  # the length of each
    columns: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COLUMNS, 0.0))  # sum: the steps'
    hidden: float = 0.0  # transfers were in progress and cost nothing
    exposed: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # waits, by the transfer
    sent: int = 0  # bytes given to other ranks

    @property
    def step(self) -> float:
        return sum(self.steps.values()) / len(self.steps)


def shares(recorded: Recorded) -> list[Share]:
    """Return the share of every rank, over the steps that are whole on all of them."""
    steps = set(recorded.steps)
    return [share_of(rank, slices, steps) for rank, slices in recorded.ranks.items()]


def share_of(rank: int, slices: Iterable[Slice], steps: set[int]) -> Share:
    """Return a rank's share by a walk over the beginnings and ends of its events in order of time."""
    share, marks = Share(rank), list[tuple[float, int, int, Slice]]()
    for each in slices:
        place = PLACES.get((each.family, each.kind), PLACES.get((each.family, "")))
        if place is None or (place == STEP and each.step not in steps):
            continue
        if place == STEP:
            share.steps[each.step] = each.ended - each.begun
        elif place == FLIGHT and each.step in steps:
            share.sent += each.nbytes
        if each.ended > each.begun:
            marks += [(each.begun, 1, place, each), (each.ended, 0, place, each)]
    under_way: list[list[Slice]] = [[] for _ in range(FLIGHT + 1)]  # by index in CLAIMS, the latest last
    before = 0.0
    for now, begins, place, each in sorted(marks):  # at equal times ends come first
        if under_way[STEP]:
            account(share, under_way, now - before)
        before = now
        if begins:
            under_way[place].append(each)
        else:
            under_way[place].remove(each)
    return share


def account(share: Share, under_way: list[list[Slice]], lasted: float) -> None:
    """Add a segment of time to its column."""
    column, latest = next(
        ((name, here[-1]) for (name, *_), here in zip(CLAIMS, under_way, strict=False) if here), (OTHER, None)
    )
    share.columns[column] += lasted
    if column == EXPOSED and latest is not None:
        around = under_way[PLACES[BETWEEN, ""]]
        stage = around[-1].unit if around and not latest.unit else ""  # stage that needs the transfer
        share.exposed[f"{latest.name} (for {stage})" if stage else latest.name] += lasted
    elif under_way[FLIGHT]:
        share.hidden += lasted


def exposed_by_unit(found: list[Share]) -> list[tuple[str, float]]:
    """Return (transfer waited for, mean of the ranks in microseconds per step), the longest first."""
    total: dict[str, float] = defaultdict(float)
    for share in found:
        for name, lasted in share.exposed.items():
            total[name] += lasted / len(share.steps) / len(found)
    return sorted(total.items(), key=lambda each: -each[1])


def make_parser() -> Parser:
    """Make the parser of the command line."""
    parser = Parser(
        prog="zero-mpi trace",
        description="Summarize where the time of each rank went, from a timeline of zero_mpi.train --trace. "
        "To view the timeline, open the file at ui.perfetto.dev (it is not uploaded) or in chrome://tracing.",
    )
    parser.add_argument("file", metavar="FILE", help="timeline written by --trace, .json or .json.gz")
    return parser


def command(world: World, arguments: Sequence[str]) -> int:
    """Print the table. Return the exit status."""
    write(table(read(Path(make_parser().parse_args(arguments).file))))
    return 0


def table(recorded: Recorded) -> Iterator[str]:
    """Yield lines about a timeline: a row for each rank, and what the ranks waited for."""
    found, steps = shares(recorded), recorded.steps
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    which += f" of {plural(len(found), 'rank')}"
    yield f"{shown(recorded.path)}: {which}, zero_mpi {shown(recorded.about['zero_mpi'], 40)}"
    yield "milliseconds per step, and share of the step"
    columns = [name for name in COLUMNS if name == OTHER or any(share.columns[name] for share in found)]
    names = "".join(f" {name:>15}" for name in columns)
    yield from ("", f"{'rank':>4} {'step':>10}{names} {HIDDEN:>10} {'sent MB':>9}")
    yield from (row(share, columns) for share in found)
    yield from ("", *MEANING, "")
    longest = exposed_by_unit(found)[:UNITS]
    if longest:
        yield "longest waits (mean of ranks, ms per step):"
        yield from (f"  {lasted / 1e3:>10.3f}  {name}" for name, lasted in longest)
    wrong, ends_in = recorded.about.get("clock_error_us"), recorded.about.get("ends_in")
    if isinstance(wrong, int | float) and 0 < wrong <= LATEST:
        yield f"clocks of different hosts are aligned to {wrong:.0f} us"
    if ends_in is not None:
        yield f"recording ended in step {shown(ends_in, 40)}: there were too many events"


def row(share: Share, columns: Sequence[str]) -> str:
    """Return the row of a rank."""
    count, step = len(share.steps), share.step
    cells = ""
    for name in columns:
        mean = share.columns[name] / count
        cells += f" {mean / 1e3:>10.3f} " + (f"{100 * mean / step:3.0f}%" if step else "  - ")
    sent, hidden = share.sent / count / 1e6, share.hidden / count
    return f"{share.rank:>4} {step / 1e3:>10.3f}{cells} {hidden / 1e3:>10.3f} {sent:>9.2f}"


main = partial(run, "trace", command, alone=True)
