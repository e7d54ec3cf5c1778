"""Layout of a model: its units, their schedule, and their memory, all known in advance.

The layout is computed from the stages alone, without arrays, because a transport with shared memory reserves
its buffers before the model exists, and all ranks must compute the same sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import count
from math import prod
from typing import Any

import numpy as np

from zero_mpi.comm import Partition
from zero_mpi.device import Host
from zero_mpi.device.arrays import BufferPool
from zero_mpi.device.types import Array
from zero_mpi.nn.layer import Param, Stack, Stage, stage_params
from zero_mpi.sharding.actions import Actions, Backward, Gather, Loss, Reduce, Release, Turn, Wait, WaitReduce
from zero_mpi.sharding.precision import FP32, Precision, floats
from zero_mpi.sharding.schedule import Indices, Parts, Schedule, make_schedule
from zero_mpi.sharding.strategy import FULL_SHARD, Strategy
from zero_mpi.sharding.unit import (
    FROZEN,
    FULL,
    TRAINED,
    BlockUnit,
    Stored,
    Unit,
    block_units,
    part_units,
    units_by_bytes,
    units_by_row,
    units_by_scope,
    with_owners,
)

BUCKET_MB = 25.0  # MiB; large enough to hide the latency of a message, small enough to start early


@dataclass(frozen=True)
class LayoutConfig:
    """Settings that determine a model's units, their schedule and their memory.

    strategy    FULL_SHARD, SHARD_GRAD_OP, NO_SHARD or HYBRID_SHARD
    prefetch    how many stages ahead parameters are gathered (FULL_SHARD, HYBRID_SHARD)
    bucket_mb   size in MiB of units that are cut by bytes: all units under NO_SHARD, otherwise expert stacks
    frozen      name patterns ("blk.0.*") of parameters without gradients, moments or reductions
    by_rows     one unit per parameter, cut between rows (dimension 0), unless the strategy is NO_SHARD
    precision   FP32, BF16 or FP16: the type of gathered parameters, activations and reduced gradients
    stored      name -> BlockKind of frozen parameters in a file's quantized blocks, on CPUs only; they are
                filled by `load_stored`, gathered as bytes and unpacked for layers
    whole       name patterns of matrices that are stored in full on one rank each, as Muon needs them
    """

    strategy: Strategy = FULL_SHARD
    prefetch: int = 1
    bucket_mb: float = BUCKET_MB
    frozen: Sequence[str] = ()
    by_rows: bool = False
    precision: Precision = FP32
    stored: Stored = field(default_factory=dict)
    whole: Sequence[str] = ()

    def kind_of(self, name: str, param: Param) -> str:
        """Return the kind of unit that a parameter needs: TRAINED, FULL or FROZEN."""
        if param.buffer or not is_trainable(name, self.frozen):
            return FROZEN
        return FULL if any(fnmatchcase(name, pattern) for pattern in self.whole) else TRAINED


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a parameter's name; a pattern with "!" in front is negated."""
    return fnmatchcase(name, pattern.removeprefix("!")) != pattern.startswith("!")


def is_trainable(name: str, frozen: Sequence[str]) -> bool:
    return not any(matches(name, pattern) for pattern in frozen)


def check_patterns(label: str, patterns: Sequence[str], names: Collection[str]) -> None:
    """Raise ValueError for a pattern that matches no name, which is most likely a typo."""
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            few = ", ".join(list(names)[:3])
            raise ValueError(f"{label} pattern {pattern!r} matches no parameter; names are like {few}")


@dataclass(frozen=True)
class Layout:
    """The units of a model, the units that each stage uses, the schedule, and the sizes of buffers.

    parts     stage -> its stacked parameters, if they are split over several units
    buffers   lengths of gradient buffers in float32 elements; in low precision, twice as many elements fit
    gathers   lengths of buffers for gathered parameters, in float32 elements
    """

    config: LayoutConfig
    units: list[Unit]
    uses: list[Indices]
    parts: dict[int, Parts]
    schedule: Schedule
    buffers: tuple[int, ...]
    gathers: tuple[int, ...]

    def full(self, ranks: int) -> list[Partition]:
        """Return the partition of each unit's shared array: its parameters, or its summed gradients.

        A replicated unit that is frozen shares nothing, because it has no gradient.
        """
        units = self.with_owners(ranks).units
        if self.config.strategy.shards_moments:
            return [unit.gathered_split(ranks, self.config.precision.compute) for unit in units]
        kind = self.config.precision.master
        return [unit.gathered_split(ranks, kind) if unit.trainable else Partition(0, ranks) for unit in units]

    def with_owners(self, ranks: int) -> Layout:
        """Return the layout for `ranks` ranks, with an owner for each matrix that one rank stores in full."""
        return replace(self, units=with_owners(self.units, ranks, products_of))


def products_of(shape: tuple[int, ...]) -> int:
    """Return Muon's FLOP for an m x n matrix with m <= n, 20 m^2 n + 10 m^3, to balance the owners' work."""
    m, n = sorted(shape[-2:])
    return prod(shape[:-2]) * (20 * m * m * n + 10 * m**3)


def lay_out(stages: Sequence[Stage], config: LayoutConfig) -> Layout:
    """Return the layout of a model. Units of stored blocks are always gathered."""
    strategy, params = config.strategy, stage_params(list(stages))
    stacks = [*cut_stacks(stages, config, params)]
    stack_units = [unit for _, _, pieces in stacks for _, group in pieces for unit in group]
    split = {name for unit in stack_units for name in unit.params}
    stored = {name: kind for name, kind in config.stored.items() if name not in split}
    kinds = {name: config.kind_of(name, p) for name, p in params.items() if name not in config.stored}
    rest = {name: params[name] for name in kinds if name not in split}
    if strategy.buckets:
        units = units_by_bytes(rest, kinds.__getitem__, int(config.bucket_mb * 2**20))
    else:
        units = (units_by_row if config.by_rows else units_by_scope)(stages, rest, kinds.__getitem__)
    units = [*units, *block_units(stages, params, stored)]
    home = {name: number for number, unit in enumerate(units) for name in unit.params}
    uses = [tuple(dict.fromkeys(home[p] for p in stage.layer.params() if p in home)) for stage in stages]
    counter = count(len(units))
    units += stack_units
    parts = dict[int, Parts]()
    for stage, stack, pieces in stacks:
        members, groups = zip(*pieces, strict=True)
        numbers = tuple(tuple(next(counter) for _ in group) for group in groups)
        parts[stage] = Parts(stack.names, members, numbers, stack.again)
    schedule = make_schedule(
        uses,
        [stage.layer.backward_reads_params for stage in stages],
        [unit.trainable for unit in units],
        config.prefetch,
        gathers=[strategy.shards_parameters or isinstance(unit, BlockUnit) for unit in units],
        parts=parts,
    )
    unit_names, stage_names = tuple(unit.name for unit in units), tuple(stage.scope for stage in stages)
    schedule = replace(schedule, unit_names=unit_names, stage_names=stage_names)
    gradients, gathers = buffer_lengths(Lending(units, uses, config.precision), schedule)
    return Layout(
        config, units, uses, parts, schedule, gradients, gathers if strategy.shards_parameters else ()
    )


def cut_stacks(
    stages: Sequence[Stage], config: LayoutConfig, params: Mapping[str, Param]
) -> Iterator[tuple[int, Stack, list[tuple[slice, list[Unit]]]]]:
    """Yield (stage, its stack, units of each part) for each stage whose stack is split over several units.

    A stack is split only if a single stage uses it, but not the last, which runs forward and backward as one.
    """
    if config.strategy.buckets or config.by_rows:
        return
    users = Counter(name for stage in stages for name in stage.layer.params())
    for number, stage in enumerate(stages[:-1]):
        match stage.layer.stacks():
            case [stack] if all(users[name] == 1 for name in stack.names):
                stacked = {name: params[name] for name in stack.names}
                kinds = {name: config.kind_of(name, param) for name, param in stacked.items()}
                limit = int(config.bucket_mb * 2**20)
                parts = part_units(stage.scope, stacked, kinds.__getitem__, config.stored, limit)
                if parts:
                    yield number, stack, parts


def layout_facts(stages: Sequence[Stage], config: LayoutConfig, units: Sequence[Unit]) -> dict[str, object]:
    """Return the facts that must be equal on all ranks; otherwise ranks would start different collectives."""
    facts = {"the strategy": config.strategy, "the precision": config.precision}
    facts |= {name: getattr(config, name) for name in ("prefetch", "bucket_mb", "by_rows", "whole")}
    facts |= {f"stage {i}": f"{s.scope} ({type(s.layer).__name__})" for i, s in enumerate(stages)}
    for unit in units:
        kind = "trained" if unit.trainable else "frozen"
        for name, param in unit.params.items():
            fact = f"{param.shape}, {config.stored.get(name, kind)}, in unit {unit.name}"
            facts[f"parameter {unit.label(name)}"] = fact
    return facts


# ------------------------------------------------------------------- lengths of buffers in use at once

ROUNDS = 3  # rounds after which a step needs no new buffers


class LengthOnly(Host):
    """Device whose arrays have a length but no memory, for code that only counts arrays."""

    def empty(self, size: int, dtype: Any = np.float32) -> Array:
        """Return a flat array of `size` elements that all share one element of memory."""
        return np.lib.stride_tricks.as_strided(np.empty(1, dtype), (size,), (0,))


class Lending:
    """Simulation of the buffers that a rank borrows if it has no shared memory and no sums in place."""

    def __init__(self, units: Sequence[Unit], uses: Sequence[Indices], precision: Precision) -> None:
        self._units, self._uses, self._precision = units, uses, precision
        self.parameters, self.gradients = (BufferPool(where=LengthOnly()) for _ in range(2))
        self._full: dict[int, Array | None] = {}  # unit -> its borrowed buffer; None once unpacked
        self._sums = dict[int, Array]()
        self._open_units = set[int]()  # units whose gradients are not being reduced yet

    def follow(self, actions: Actions, idle: bool) -> None:
        """Borrow and return buffers as the actions do; idle: no micro-batch, so backward adds nothing.

        A gathered buffer is returned after it is unpacked to another buffer.
        """
        kind = self._precision.compute
        for action in actions:
            match action:
                case Gather(unit) if unit not in self._full:
                    self._full[unit] = self.parameters.take(self._units[unit].gathered_size(kind))
                case Wait(unit) if self._units[unit].unpacked_size(kind) and self._full.get(unit) is not None:
                    self.parameters.give(self._full[unit])
                    self._full[unit] = None
                case Release(unit) if (buffer := self._full.pop(unit, None)) is not None:
                    self.parameters.give(buffer)
                case Backward(stage) | Loss(stage) if not idle:
                    self._add(self._uses[stage])
                case Turn(adds=units) if not idle:
                    self._add(units)
                case Reduce(unit):
                    self._add((unit,))
                    self._open_units.remove(unit)
                case WaitReduce(unit):
                    self._end(unit)

    def _add(self, units: Indices) -> None:
        """Borrow the buffers in which gradients are added, after the previous round has been summed."""
        for unit in units:
            if self._units[unit].trainable and unit not in self._open_units:
                self._end(unit)
                length = floats(self._units[unit].length, self._precision.reduce)
                self._sums[unit] = self.gradients.take(length)
                self._open_units.add(unit)

    def _end(self, unit: int) -> None:
        if unit in self._sums and unit not in self._open_units:
            self.gradients.give(self._sums.pop(unit))

    def end_step(self) -> None:
        for unit in range(len(self._units)):
            self._end(unit)


def buffer_lengths(lending: Lending, schedule: Schedule) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the lengths of all buffers that steps and evaluations in any order use: (gradients, parameters).

    Lengths are in float32 elements, longest first; arrays unpacked from stored units are not included.
    """
    previous, lengths = None, (lending.gradients.lengths, lending.parameters.lengths)
    while previous != lengths:
        for rounds in kinds_of_steps(schedule):
            for actions, idle in rounds:
                lending.follow(actions, idle)
            lending.end_step()
        previous, lengths = lengths, (lending.gradients.lengths, lending.parameters.lengths)
    return lengths


def kinds_of_steps(schedule: Schedule) -> Iterator[list[tuple[Actions, bool]]]:
    """Yield steps as lists of rounds: (actions, whether the rank has no micro-batch)."""
    gathers = tuple(map(Gather, schedule.first_gathers))  # prefetched before and after an evaluation
    for rounds in range(ROUNDS + 1):
        yield [(schedule.training, False)] * rounds
        yield [*[(schedule.training, False)] * rounds, (schedule.training, True)]
    for actions in (schedule.training, (*schedule.forward, *schedule.backward)):
        yield [(actions, False), (schedule.inference, True), (gathers, True)]
