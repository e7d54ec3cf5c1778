"""How long a step takes: the script of a simulation played against a clock.

Computing moves the clock. A transfer goes on a line behind those that were started before it and is complete
some time after it has left the line, whatever the rank does meanwhile; a wait moves the clock to that time,
and what it moves is the exposed communication. Inside one node a transfer is copying by the ranks' own cores,
so there nothing is hidden, unless GPUs compute. All ranks are taken to be as fast as rank 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace

from zero_mpi.plan.case import Case
from zero_mpi.plan.cost_model import allreduce_seconds, unit_cost
from zero_mpi.plan.line import Cost, TransferLine
from zero_mpi.plan.machine import Machine
from zero_mpi.plan.rank_memory import NUMBER
from zero_mpi.plan.simulate import COMPUTE, MOST_ROUNDS, NORM, TRANSFERS, UPDATE, WAIT, StepEvent, simulate
from zero_mpi.plan.traffic import FLAGS
from zero_mpi.sharding.unit import BYTES

UPDATE_PASSES = 7  # AdamW reads parameter, gradient and both moments, and writes three of them


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of rank 0, and floating-point operations of its products."""

    seconds: float
    computation: float
    communication: float  # of all transfers, one after the other
    exposed: float  # what the rank stands and waits for them
    flop: float


def plus(a: StepTime, b: StepTime, times: float = 1.0) -> StepTime:
    """a + times b."""
    return StepTime(*(x + times * y for x, y in zip(astuple(a), astuple(b), strict=True)))


class Player:
    """Plays events; `time` is what they have taken."""

    def __init__(self, case: Case, machine: Machine) -> None:
        self.case, self.machine = case, machine
        self.overlaps = case.nodes > 1 or case.on_gpu
        self.now = self.computed = self.communicated = self.exposed = self.flop = 0.0
        self._line = TransferLine()
        self._costs: dict[tuple[str, int], Cost] = {}

    @property
    def time(self) -> StepTime:
        """So far."""
        return StepTime(self.now, self.computed, self.communicated, self.exposed, self.flop)

    def play(self, events: Iterable[StepEvent]) -> None:
        """One event after the other."""
        for event in events:
            if event.kind == COMPUTE:
                self.compute(event.flop, event.moved)
            elif event.kind == WAIT:
                self.wait(self._line.complete((event.what, event.unit)))
            elif event.kind in TRANSFERS:
                self.start(event.kind, event.unit)
            else:
                self.finish(event.kind)

    def compute(self, flop: float, moved: float) -> None:
        """Products, and passes over arrays."""
        seconds = flop / self.machine.flops + moved / self.machine.moves
        self.flop += flop
        self.now += seconds
        self.computed += seconds

    def start(self, kind: str, unit: int) -> None:
        """A transfer joins the line."""
        key = kind, unit
        if key not in self._costs:
            self._costs[key] = unit_cost(self.case, self.machine, unit, kind)
        self.communicated += sum(self._costs[key])
        self._line.start(key, self.now, self._costs[key])
        if not self.overlaps:
            self.wait(self._line.complete(key))

    def wait(self, until: float) -> None:
        """Stand until then."""
        late = max(0.0, until - self.now)
        self.exposed += late
        self.now += late

    def finish(self, kind: str) -> None:
        """What a step ends with: the total of the losses, the norm of the gradient, the update."""
        case = self.case
        if kind == UPDATE:
            self.update(sum(case.updated(unit, own) for unit, own in case.trained))
            return
        numbers = case.rounds.micro_batches + FLAGS
        if kind == NORM:
            numbers = case.chunks
            self.compute(0.0, BYTES * sum(own for _, own in case.trained))
            if case.hybrid:
                case = replace(case, ranks=case.owners, nodes=1)
        seconds = allreduce_seconds(case, self.machine, NUMBER * numbers)
        self.communicated += seconds
        self.wait(self.now + seconds)

    def update(self, elements: int) -> None:
        """AdamW, which also rounds in low precision; what is offloaded comes and goes meanwhile."""
        kinds, begun = self.case.precision, self.now
        self.compute(0.0, elements * (UPDATE_PASSES * BYTES + kinds.compute.itemsize * kinds.is_low))
        seconds = self.case.offloaded * BYTES * elements / self.machine.host_link
        self.communicated += seconds
        self.wait(begun + seconds)


def step_time(case: Case, machine: Machine) -> StepTime:
    """The time of a step that another one came before."""
    machine = machine.joining(case.nodes)
    rounds = len(case.rounds)
    if rounds <= MOST_ROUNDS:
        return played(case, machine)
    most, fewer = (
        played(replace(case, batch_size=count * case.ranks * case.micro_batch), machine)
        for count in (MOST_ROUNDS, MOST_ROUNDS - 1)
    )
    return plus(most, plus(most, fewer, -1.0), rounds - MOST_ROUNDS)


def played(case: Case, machine: Machine) -> StepTime:
    """The time of the second step of the simulation."""
    player = Player(case, machine)
    first, second = simulate(case).steps
    player.play(first)
    before = player.time
    player.play(second)
    return plus(player.time, before, -1.0)


def tokens_per_second(case: Case, time: StepTime) -> float:
    """Of all ranks together."""
    return case.tokens / time.seconds if time.seconds else float("inf")
