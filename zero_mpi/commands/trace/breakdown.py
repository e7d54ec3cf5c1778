"""Where the time of each rank went.

Each moment of a step belongs to the first of `CLAIMS` that is under way, so the columns of a rank add up to
the step. Computing goes before waiting: on a GPU the host may wait for a transfer while the device computes,
and such a transfer is hidden. Transfers that are under way while nobody waits for them are hidden too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from zero_mpi.commands.trace.read import Lane, Recorded
from zero_mpi.telemetry.spans import BETWEEN, CHECKPOINT, COMPUTE, DATA, OPTIMIZER, STALLS, STEPS, WAITS
from zero_mpi.train.trace_events import FAMILIES

EXPOSED, HIDDEN, OTHER = "exposed", "hidden", "other"
# Column, track, kinds (all if none are named); the first that is under way has the moment.
CLAIMS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("evaluation", STEPS, ("evaluation",)),
    ("checkpoint", CHECKPOINT, ()),
    ("compute", COMPUTE, ()),
    ("optimizer", OPTIMIZER, ("update",)),
    (EXPOSED, WAITS, ()),
    (EXPOSED, STALLS, ()),
    ("optimizer", OPTIMIZER, ()),
    ("moving", BETWEEN, ()),
    ("data", DATA, ()),
)
COLUMNS = ("compute", EXPOSED, "moving", "optimizer", "data", "evaluation", "checkpoint", OTHER)
STEP, FLIGHT = len(CLAIMS), len(CLAIMS) + 1  # beside the claims: steps, and transfers under way
PLACES = {
    (track, kind): place for place, (_, track, kinds) in enumerate(CLAIMS) for kind in kinds or ("",)
}  # fmt: skip
PLACES |= {(STEPS, "step"): STEP} | {(family, ""): FLIGHT for family in FAMILIES}
UnderWay = dict[int, list[int]]  # by place: the numbers of a rank's slices, the latest last


@dataclass
class Share:
    """A rank's time in all steps, in microseconds.

    steps     the length of each
    columns   time by column; they add up to the steps'
    hidden    time in which transfers were under way and cost nothing
    exposed   time in waits by what was waited for
    sent      bytes given to other ranks, by kind of transfer
    """

    lane: Lane
    steps: dict[int, float] = field(default_factory=dict)
    columns: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COLUMNS, 0.0))
    hidden: float = 0.0
    exposed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    sent: Counter[str] = field(default_factory=Counter)

    def mean(self, column: str) -> float:
        """Of a column, over the steps; also of `step` and `hidden`."""
        others = {"step": sum(self.steps.values()), HIDDEN: self.hidden}
        return (self.columns | others)[column] / len(self.steps)

    @property
    def step(self) -> float:
        """The mean step."""
        return self.mean("step")


def shares(recorded: Recorded) -> list[Share]:
    """Of every rank, over the steps that are whole on all of them."""
    steps = set(recorded.steps)
    return [share_of(lane, steps) for lane in recorded.ranks]


def share_of(lane: Lane, steps: set[int]) -> Share:
    """Walk over the beginnings and ends of a rank's events in order of time."""
    share, marks = Share(lane), []
    for number, each in enumerate(lane.slices):
        place = PLACES.get((each.family, each.kind), PLACES.get((each.family, "")))
        if place is None or (place == STEP and each.step not in steps):
            continue
        if place == STEP:
            share.steps[each.step] = each.ended - each.begun
        elif place == FLIGHT and each.step in steps:
            share.sent[each.family] += each.nbytes
        if each.ended > each.begun:
            marks += [(each.begun, 1, number, place), (each.ended, 0, number, place)]
    under_way: UnderWay = {place: [] for place in range(len(CLAIMS) + 2)}
    before = 0.0
    for now, begins, number, place in sorted(marks):  # at one time what ends goes first
        if under_way[STEP]:
            account(share, lane, under_way, now - before)
        before = now
        if begins:
            under_way[place].append(number)
        else:
            under_way[place].remove(number)
    return share


def account(share: Share, lane: Lane, under_way: UnderWay, lasted: float) -> None:
    """Add a stretch of time to what has it."""
    place = next((place for place in range(len(CLAIMS)) if under_way[place]), None)
    column = OTHER if place is None else CLAIMS[place][0]
    share.columns[column] += lasted
    if column == EXPOSED and place is not None:
        share.exposed[name_of(lane, under_way[place][-1], under_way)] += lasted
    elif under_way[FLIGHT]:
        share.hidden += lasted


def name_of(lane: Lane, number: int, under_way: UnderWay) -> str:
    """What is waited for, with the stage that needs it where the wait itself has no name for it."""
    waited, around = lane.slices[number], under_way[PLACES[BETWEEN, ""]]
    stage = lane.slices[around[-1]].unit if around else ""
    return f"{waited.name} (for {stage})" if stage and not waited.unit else waited.name


def exposed_by_unit(found: Sequence[Share]) -> list[tuple[str, float]]:
    """(what is waited for, microseconds a step, the mean of the ranks), the longest first."""
    total: dict[str, float] = defaultdict(float)
    for share in found:
        for name, lasted in share.exposed.items():
            total[name] += lasted / len(share.steps) / len(found)
    return sorted(total.items(), key=lambda each: -each[1])
