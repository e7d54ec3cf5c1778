"""How a model is cut into units, when they travel, and what memory that takes: all that is known beforehand.

Worked out from the stages alone, without an array, so that a transport which shares memory can be asked for
it before the model is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from zero_mpi.arrays import Array, BufferPool
from zero_mpi.comm import Partition
from zero_mpi.device import HOST
from zero_mpi.nn.layer import Stage, stage_params
from zero_mpi.sharding.precision import FP32, Precision, floats
from zero_mpi.sharding.schedule import Indices, Schedule, StagePlan, make_schedule
from zero_mpi.sharding.strategy import Strategy
from zero_mpi.sharding.unit import Unit, units_by_bytes, units_by_scope

REDUCTIONS_IN_FLIGHT = 2  # units whose gradients may be under way while the next one is computed
BUCKET_MB = 25.0  # as large as hides the latency of a message, small enough to start early
ROUNDS = 3  # of micro-batches in a step, after which the same buffers are lent again


@dataclass(frozen=True)
class Layout:
    """units; the numbers of those that each stage uses; their schedule; what is lent at once.

    buffers   of gradients, gathers   of parameters that are gathered: lengths of float32 arrays, which have
              room for twice as many elements in low precision
    """

    units: list[Unit]
    uses: list[Indices]
    schedule: Schedule
    buffers: tuple[int, ...]
    gathers: tuple[int, ...]
    precision: Precision = FP32

    def wholes(self, strategy: Strategy, ranks: int) -> list[Partition]:
        """Per unit, what of it is one array where ranks share memory: parameters, else summed gradients.

        Nothing of a replicated unit that is frozen: it has no gradient.
        """
        if strategy.shards_moments:
            return [self._room(unit, ranks) for unit in self.units]
        return [unit.partition(ranks) if unit.trainable else Partition(0, ranks) for unit in self.units]

    def _room(self, unit: Unit, ranks: int) -> Partition:
        """Float32 elements that a unit's parameters take in the type of computing."""
        kind = self.precision.compute
        return Partition(floats(unit.length, kind), ranks, floats(unit.quantum, kind))


def is_trainable(name: str, frozen: Sequence[str]) -> bool:
    """Whether no frozen pattern matches the parameter's name."""
    return not any(fnmatchcase(name, pattern) for pattern in frozen)


def lay_out(
    stages: Sequence[Stage],
    strategy: Strategy,
    *,
    prefetch: int = 1,
    bucket_mb: float = BUCKET_MB,
    frozen: Sequence[str] = (),
    by_rows: bool = False,
    precision: Precision = FP32,
) -> Layout:
    """The layout of a ShardedModule with the same arguments."""
    params = stage_params(list(stages))

    def trainable(name: str) -> bool:
        return is_trainable(name, frozen)

    if strategy.buckets:
        units = units_by_bytes(params, trainable, int(bucket_mb * 2**20))
    else:
        units = units_by_scope(stages, params, trainable, by_rows)
    home = {name: number for number, unit in enumerate(units) for name in unit.params}
    uses = [tuple(dict.fromkeys(home[name] for name in stage.layer.params())) for stage in stages]
    schedule = make_schedule(
        uses,
        [stage.layer.backward_reads_params for stage in stages],
        [unit.trainable for unit in units],
        prefetch,
    )
    gathers = gather_buffers(units, schedule) if strategy.shards_parameters else ()
    return Layout(
        units,
        uses,
        schedule,
        tuple(floats(length, precision.reduce) for length in gradient_buffers(units, uses, schedule)),
        tuple(floats(length, precision.compute) for length in gathers),
        precision,
    )


class Rehearsal:
    """Takes and gives gradient buffers in the order of `ShardedModule.backward`, and computes nothing."""

    def __init__(self, units: Sequence[Unit], uses: Sequence[Indices], schedule: Schedule) -> None:
        self.units, self.uses, self.schedule = units, uses, schedule
        self.pool = BufferPool(where=HOST)  # its memory is never touched, so it takes none
        self.lengths: dict[int, int] = {}  # of all buffers that were ever taken
        self.open: dict[int, Array] = {}  # by unit
        self.travelling: dict[int, Array] = {}
        self.reducing: deque[int] = deque()

    def step(self, rounds: int, idle: bool) -> None:
        """A step: `rounds` with a micro-batch, then one without if `idle`, then all is waited for."""
        for number in range(rounds + idle):
            self.round(idle=number == rounds)
        while self.reducing:
            self.wait(self.reducing.popleft())

    def round(self, idle: bool) -> None:
        """One backward; a rank without a micro-batch takes a buffer only when its reduction starts."""
        for stage in range(len(self.uses) - 1, self.schedule.last_backward - 1, -1):
            for unit in self.uses[stage] if not idle else ():
                self.take(unit)
            for unit in self.schedule.backward[stage].reduce:
                while len(self.reducing) >= REDUCTIONS_IN_FLIGHT:
                    self.wait(self.reducing.popleft())
                self.take(unit)
                self.travelling[unit] = self.open.pop(unit)
                self.reducing.append(unit)

    def take(self, unit: int) -> None:
        """A buffer for the unit's gradient, unless it has one or needs none."""
        if self.units[unit].trainable and unit not in self.open:
            self.wait(unit)
            self.open[unit] = self.pool.take(self.units[unit].length)
            self.lengths[id(self.open[unit])] = int(self.open[unit].size)

    def wait(self, unit: int) -> None:
        """The unit's reduction is complete, if it was under way."""
        if unit in self.travelling:
            self.pool.give(self.travelling.pop(unit))


def gradient_buffers(units: Sequence[Unit], uses: Sequence[Indices], schedule: Schedule) -> tuple[int, ...]:
    """Lengths of the buffers that a pool holds after steps of all kinds, longest first.

    Every rank's steps are of these kinds, and each begins with all buffers free, so that it finds the same.
    """
    rehearsal = Rehearsal(units, uses, schedule)
    known = -1
    while known != rehearsal.pool.nbytes:
        known = rehearsal.pool.nbytes
        for rounds in range(ROUNDS + 1):
            for idle in (False, True):
                rehearsal.step(rounds, idle)
    return tuple(sorted(rehearsal.lengths.values(), reverse=True))


class GatherRehearsal:
    """Takes and gives buffers of gathered parameters in the order of `ShardedModule`; computes nothing."""

    def __init__(self, units: Sequence[Unit], schedule: Schedule) -> None:
        self.units, self.schedule = units, schedule
        self.pool = BufferPool(where=HOST)  # its memory is never touched, so it takes none
        self.lengths: dict[int, int] = {}
        self.open: dict[int, Array] = {}

    def start(self, plan: StagePlan) -> None:
        """Gather what a plan starts with."""
        for unit in plan.start:
            if unit not in self.open:
                self.open[unit] = self.pool.take(self.units[unit].length)
                self.lengths[id(self.open[unit])] = int(self.open[unit].size)

    def drop(self, plan: StagePlan) -> None:
        """Give up what a plan drops."""
        for unit in plan.drop:
            if unit in self.open:
                self.pool.give(self.open.pop(unit))

    def walk(self, plans: Sequence[StagePlan]) -> None:
        """One pass over stages."""
        for plan in plans:
            self.start(plan)
            self.drop(plan)

    def end(self) -> None:
        """Give up everything, as before an update."""
        for unit in list(self.open):
            self.pool.give(self.open.pop(unit))

    def step(self, at_once: bool) -> None:
        """A forward and a backward; `at_once`: the last stage runs both ways before it drops anything."""
        *ascent, top = self.schedule.forward
        descent = self.schedule.backward[self.schedule.last_backward :][::-1]
        self.walk(ascent)
        self.start(top)
        if not at_once:
            self.drop(top)
        self.start(self.schedule.backward[-1])
        self.drop(top)
        self.walk(descent)


def gather_buffers(units: Sequence[Unit], schedule: Schedule) -> tuple[int, ...]:
    """Lengths of the buffers that a pool holds after steps and evaluations in any order, longest first."""
    rehearsal = GatherRehearsal(units, schedule)
    known = -1
    while known != rehearsal.pool.nbytes:
        known = rehearsal.pool.nbytes
        for at_once in (True, False):
            for ends in (True, False):
                rehearsal.step(at_once)
                if ends:
                    rehearsal.end()
                rehearsal.walk(schedule.evaluate)
                rehearsal.start(schedule.forward[0])  # as `prefetch_forward_params` does
    return tuple(sorted(rehearsal.lengths.values(), reverse=True))
