"""The gradients of a unit on one rank: those that backward adds in a round, and a slice of their sum.

`views` opens a round and sets its gradients to zero; `start_reduce` ends it. Each class is a way to keep the
sum: only a shard, or where every rank updates everything also the whole.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from zero_mpi import device
from zero_mpi.comm import DONE, Comm, Handle
from zero_mpi.device.arrays import read_only
from zero_mpi.device.types import Array
from zero_mpi.sharding.parameters import Context, Views
from zero_mpi.sharding.precision import as_kind, floats
from zero_mpi.sharding.strategy import Strategy
from zero_mpi.sharding.unit import Unit


def accumulates_locally(comm: Comm, strategy: Strategy) -> bool:
    """Return whether micro-batches are summed on each rank before one allreduce a step: NO_SHARD, fast."""
    return not strategy.shards_moments and not comm.exact and comm.size > 1


class Gradients:
    """Base of all gradients; by itself those of a frozen unit, which has none.

    sum       this rank's slice of the gradients, summed over ranks and rounds, float32
    whole     all of the sum, where this rank updates all of the unit; else None
    rounds    number of rounds in the sum, the one being reduced included
    """

    def __init__(self, unit: Unit, context: Context, own: Array, whole: Array | None = None) -> None:
        self.unit, self.context, self.sum, self.whole = unit, context, own, whole
        self.partition = unit.partition(context.comm.size)
        self.rounds = 0
        self._label = f"gradients {unit.name}"

    def views(self) -> Views:
        """Return name -> view to add gradients into; zeros at the first call of a round."""
        return {}

    def start_reduce(self, contributors: int) -> None: ...

    def wait_reduce(self) -> None: ...

    def start_gather(self) -> Handle:
        """Start to gather the full sum on every rank, if the strategy needs it."""
        return DONE

    def start_publish(self) -> Handle:
        """Start to send slices of the sum, which their owners have overwritten, to ranks that keep all."""
        return self.start_gather()

    def reset(self) -> None:
        """Forget the sum; the next round starts from zero."""
        self.wait_reduce()
        self.rounds = 0

    def scale(self, factor: float) -> None:
        """Multiply the sum by `factor`, wherever it is kept. Collective; after the norm."""
        self.sum *= factor


class SlicedGradients(Gradients):
    """A round's gradients are added in a buffer that is borrowed until they are summed into the slices."""

    def __init__(self, unit: Unit, context: Context, own: Array, whole: Array | None = None) -> None:
        super().__init__(unit, context, own, whole)
        self._kind = context.precision.reduce
        self._widens = self._kind != own.dtype  # the sum is of another type than what is summed
        self._borrowed: Array | None = None
        self._of_round = own[:0]
        self._open: Views | None = None
        self._reduce: Handle | None = None
        self._views: dict[int, Views] = {}

    def views(self) -> Views:
        if self._open is None:
            self.wait_reduce()
            buffer = self._buffer()
            self._of_round = as_kind(buffer, self.unit.length, self._kind)
            self._of_round.view(np.uint8).fill(0)  # a fill of bfloat16 elements takes four times as long
            if id(buffer) not in self._views:
                self._views[id(buffer)] = self.unit.views(self._of_round)
            self._open = self._views[id(buffer)]
        return self._open

    def _buffer(self) -> Array:
        """Return the array for this round's gradients: that of the sum if it holds nothing, or borrowed."""
        if self.context.comm.sums_in_place and self.rounds == 0 and not self._widens:
            return self.sum
        self._borrowed = self.context.gradients.take(floats(self.unit.length, self._kind))
        return self._borrowed

    def start_reduce(self, contributors: int) -> None:
        self.views()
        self._open, accumulate = None, self.rounds > 0
        self._reduce = self._start(self._of_round, contributors, accumulate)
        self.rounds += 1

    def _start(self, of_round: Array, contributors: int, accumulate: bool) -> Handle:
        how: dict[str, Any] = {"contributors": contributors, "accumulate": accumulate, "label": self._label}
        return self.context.comm.reduce_scatter(of_round, self.sum, self.partition, **how)

    def wait_reduce(self) -> None:
        if self._reduce is not None:
            self._reduce.wait()
            self._reduce = None
            self._give_back()

    def _give_back(self) -> None:
        if self._borrowed is not None:
            self.context.gradients.give(self._borrowed)
            self._borrowed = None

    def reset(self) -> None:
        super().reset()
        self._open = None  # an error may have ended the round
        self._give_back()


class ReplicatedGradients(SlicedGradients):
    """Gradients added in a full array, whose summed shards are then gathered into it."""

    whole: Array

    def _buffer(self) -> Array:
        return super()._buffer() if self._widens else self.whole

    def start_gather(self) -> Handle:
        return self.context.comm.allgather(self.sum, self.whole, self.partition, self._label)

    def scale(self, factor: float) -> None:
        super().scale(factor)
        self.whole *= factor


class AllreducedGradients(ReplicatedGradients):
    """Rounds are added on the rank; the library sums the whole once a step, and `sum` is a part of it."""

    def _start(self, of_round: Array, contributors: int, accumulate: bool) -> Handle:
        if accumulate:
            only = "pass last=False to backward for every micro-batch but the last"
            raise ValueError(f"gradients of this step are already reduced; with fast no-shard {only}")
        return self.context.comm.allreduce(of_round, self._label)

    def start_gather(self) -> Handle:
        return DONE

    def start_publish(self) -> Handle:
        return self.context.comm.allgather(None, self.whole, self.partition, self._label)

    def scale(self, factor: float) -> None:
        self.whole *= factor


class SharedGradients(SlicedGradients, Handle):
    """The full sum is stored once per node; it is complete when the reduction is."""

    def start_publish(self) -> Handle:
        self.context.comm.signal_written()
        return self

    def wait(self) -> None:
        self.context.comm.wait_written()

    def scale(self, factor: float) -> None:
        super().scale(factor)
        self.start_publish().wait()


def make_gradients(unit: Unit, context: Context, memory: Array | None) -> Gradients:
    """Return the gradients of a unit under a strategy; `memory`: what all ranks see of its sum, or None."""
    part, kind = unit.partition(context.comm.size).part(context.comm.rank), context.precision.master
    zeros = partial(device.in_use().zeros, dtype=kind)
    if not unit.trainable:
        return Gradients(unit, context, zeros(0))
    if context.strategy.shards_moments:
        return SlicedGradients(unit, context, zeros(part.stop - part.start))
    if memory is not None:
        full = as_kind(memory, unit.length, kind)
        return SharedGradients(unit, context, full[part], read_only(full))
    full = zeros(unit.length)
    if accumulates_locally(context.comm, context.strategy):
        return AllreducedGradients(unit, context, full[part], full)
    return ReplicatedGradients(unit, context, zeros(part.stop - part.start), full)
