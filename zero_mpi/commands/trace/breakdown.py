"""Where the time of each rank went.

Each moment of a step belongs to the first of `CLAIMS` that is under way, so the columns of a rank add up to
the step. Computing goes before waiting: on a GPU the host may wait for a transfer while the device computes,
and such a transfer is hidden. Transfers that are under way while nobody waits for them are hidden too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from zero_mpi.commands.trace.read import Recorded, Slice
from zero_mpi.telemetry.spans import BETWEEN, CHECKPOINT, COMPUTE, DATA, OPTIMIZER, STALLS, STEPS, WAITS
from zero_mpi.train.trace_events import FAMILIES

EXPOSED, HIDDEN, OTHER, MOVING = "exposed", "hidden", "other", "moving"
# Column, track, kinds (all if none are named); the first that is under way has the moment.
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
STEP, FLIGHT = len(CLAIMS), len(CLAIMS) + 1  # beside the claims: steps, and transfers under way
PLACES = {(track, kind): place for place, (_, track, kinds) in enumerate(CLAIMS) for kind in kinds or ("",)}
PLACES |= {(STEPS, "step"): STEP} | {(family, ""): FLIGHT for family in FAMILIES}


@dataclass
class Share:
    """Time of a rank in its steps, in microseconds.

    steps     the length of each
    columns   time by column; they add up to the steps'
    hidden    time in which transfers were under way and cost nothing
    exposed   time in waits by what was waited for
    sent      bytes given to other ranks
    """

    rank: int
    steps: dict[int, float] = field(default_factory=dict)
    columns: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COLUMNS, 0.0))
    hidden: float = 0.0
    exposed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    sent: int = 0

    @property
    def step(self) -> float:
        return sum(self.steps.values()) / len(self.steps)


def shares(recorded: Recorded) -> list[Share]:
    """Return the share of every rank, over the steps that are whole on all of them."""
    steps = set(recorded.steps)
    return [share_of(rank, slices, steps) for rank, slices in recorded.ranks.items()]


def share_of(rank: int, slices: Iterable[Slice], steps: set[int]) -> Share:
    """Walk over the beginnings and ends of a rank's events in order of time."""
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
    under_way: list[list[Slice]] = [[] for _ in range(FLIGHT + 1)]  # by place, the latest last
    before = 0.0
    for now, begins, place, each in sorted(marks):  # at one time what ends goes first
        if under_way[STEP]:
            account(share, under_way, now - before)
        before = now
        if begins:
            under_way[place].append(each)
        else:
            under_way[place].remove(each)
    return share


def account(share: Share, under_way: list[list[Slice]], lasted: float) -> None:
    """Add a stretch of time to the column that has it."""
    column, latest = next(
        ((name, here[-1]) for (name, *_), here in zip(CLAIMS, under_way, strict=False) if here), (OTHER, None)
    )
    share.columns[column] += lasted
    if column == EXPOSED and latest is not None:
        around = under_way[PLACES[BETWEEN, ""]]
        stage = around[-1].unit if around and not latest.unit else ""  # that needs what has no name
        share.exposed[f"{latest.name} (for {stage})" if stage else latest.name] += lasted
    elif under_way[FLIGHT]:
        share.hidden += lasted


def exposed_by_unit(found: list[Share]) -> list[tuple[str, float]]:
    """Return (what is waited for, microseconds a step, the mean of the ranks), the longest first."""
    total: dict[str, float] = defaultdict(float)
    for share in found:
        for name, lasted in share.exposed.items():
            total[name] += lasted / len(share.steps) / len(found)
    return sorted(total.items(), key=lambda each: -each[1])
