"""Gradients of a unit on one rank: the gradients of the current round, and the rank's slice of their sum.

`views` opens a round and sets its gradients to zero; `start_reduce` ends it. The classes differ in how they
store the sum: only as a shard or, if every rank updates all parameters, also in full.
"""

from functools import partial

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
    """Return whether each rank sums its micro-batches before one allreduce per step (NO_SHARD with fast)."""
    return not strategy.shards_moments and not comm.exact and comm.size > 1


class Gradients:
    """Base class of the gradients of a unit. It is used directly for a frozen unit, which has no gradients.

    sum       this rank's slice of the gradients, summed over ranks and rounds
    full      the full sum, if this rank updates the full unit; otherwise None
    rounds    number of rounds in the sum, including the one being reduced
    """

    def __init__(self, unit: Unit, context: Context, shard: Array, full: Array | None = None) -> None:
        self.unit, self.context, self.sum, self.full = unit, context, shard, full
        self.partition = unit.partition(context.comm.size)
        self.rounds = 0
        self._label = f"gradients {unit.name}"

    def views(self) -> Views:
        """Return name -> view to add gradients into; the views are zero at the first call of a round."""
        return {}

    def start_reduce(self, contributors: int) -> None: ...

    def wait_reduce(self) -> None: ...

    def start_gather(self) -> Handle:
        """Start to gather the full sum on every rank, if the strategy needs it."""
        return DONE

    def start_publish(self) -> Handle:
        """Start to send the sum's slices, which owners have changed, to ranks that keep the full sum."""
        return self.start_gather()

    def reset(self) -> None:
        """Drop the sum; the next round starts from zero."""
        self.wait_reduce()
        self.rounds = 0

    def scale(self, factor: float) -> None:
        """Multiply the sum by `factor`, wherever it is stored. Collective; call it after the norm."""
        self.sum *= factor


class SlicedGradients(Gradients):
    """Gradients of a round in a borrowed buffer, which is then summed over ranks into the slices."""

    def __init__(self, unit: Unit, context: Context, shard: Array, full: Array | None = None) -> None:
        super().__init__(unit, context, shard, full)
        self._kind = context.precision.reduce
        self._widens = self._kind != shard.dtype  # the sum has a wider type than the gradients
        self._lent_buffer: Array | None = None
        self._round_array = shard[:0]
        self._round_views: Views | None = None
        self._reduction: Handle | None = None
        self._views: dict[int, Views] = {}

    def views(self) -> Views:
        if self._round_views is None:
            self.wait_reduce()
            buffer = self._buffer()
            self._round_array = as_kind(buffer, self.unit.length, self._kind)
            self._round_array.view(np.uint8).fill(0)  # filling bfloat16 directly takes four times as long
            if id(buffer) not in self._views:
                self._views[id(buffer)] = self.unit.views(self._round_array)
            self._round_views = self._views[id(buffer)]
        return self._round_views

    def _buffer(self) -> Array:
        """Return the array for this round's gradients: the sum's array if unused, or a borrowed array."""
        if self.context.comm.sums_in_place and self.rounds == 0 and not self._widens:
            return self.sum
        self._lent_buffer = self.context.gradients.take(floats(self.unit.length, self._kind))
        return self._lent_buffer

    def start_reduce(self, contributors: int) -> None:
        self.views()
        self._round_views = None
        self._reduction = self._start(contributors)
        self.rounds += 1

    def _start(self, contributors: int) -> Handle:
        return self.context.comm.reduce_scatter(
            self._round_array,
            self.sum,
            self.partition,
            contributors=contributors,
            accumulate=self.rounds > 0,
            label=self._label,
        )

    def wait_reduce(self) -> None:
        if self._reduction is not None:
            self._reduction.wait()
            self._reduction = None
            self._give_back()

    def _give_back(self) -> None:
        if self._lent_buffer is not None:
            self.context.gradients.give(self._lent_buffer)
            self._lent_buffer = None

    def reset(self) -> None:
        super().reset()
        self._round_views = None  # may still be set after a failed round
        self._give_back()


class ReplicatedGradients(SlicedGradients):
    """Gradients added in a full array, into which the summed shards are then gathered."""

    full: Array

    def _buffer(self) -> Array:
        return super()._buffer() if self._widens else self.full

    def start_gather(self) -> Handle:
        return self.context.comm.allgather(self.sum, self.full, self.partition, self._label)

    def scale(self, factor: float) -> None:
        super().scale(factor)
        self.full *= factor


class AllreducedGradients(ReplicatedGradients):
    """Gradients that a rank sums over rounds, and the MPI library sums over ranks once per step."""

    def _start(self, contributors: int) -> Handle:
        if self.rounds:
            remedy = "pass last=False to backward for every micro-batch but the last"
            raise ValueError(f"gradients of this step are already reduced; with fast no-shard {remedy}")
        return self.context.comm.allreduce(self._round_array, self._label)

    def start_gather(self) -> Handle:
        return DONE

    def start_publish(self) -> Handle:
        return self.context.comm.allgather(None, self.full, self.partition, self._label)

    def scale(self, factor: float) -> None:
        self.full *= factor


class SharedGradients(SlicedGradients, Handle):
    """Gradients whose full sum is stored once per node. The sum is complete when the reduction has ended."""

    def start_publish(self) -> Handle:
        self.context.comm.signal_written()
        return self

    def wait(self) -> None:
        self.context.comm.wait_written()

    def scale(self, factor: float) -> None:
        super().scale(factor)
        self.start_publish().wait()


def make_gradients(unit: Unit, context: Context, memory: Array | None) -> Gradients:
    """Return the gradients of a unit under a strategy; `memory`: shared memory for its sum, or None."""
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
