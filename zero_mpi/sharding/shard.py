"""A unit at run time on one rank: its slice of the parameters, the gathered whole, and the gradients.

Parameters: `start_gather`, `wait_gather`, use of `weights`, `release`. Gradients: use of `gradients`,
`start_reduce`, `wait_reduce`, after which `gradient` is this rank's slice of the sum. What is not sharded
takes the same calls, which then have nothing to do. Where the transport gives one array to all ranks, that is
the whole of the parameters (of the summed gradient, where parameters are replicated): of it a rank writes its
slice and reads the rest, and gathering is waiting for what the others write. In low precision the slice of
the parameters is float32 as ever, and a rounded copy of it is what travels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from zero_mpi import device
from zero_mpi.arrays import Array, BufferPool
from zero_mpi.comm import DONE, Comm, Handle
from zero_mpi.sharding.precision import FP32, Precision, as_kind, floats
from zero_mpi.sharding.strategy import Strategy
from zero_mpi.sharding.unit import Unit

Views = dict[str, Array]


def accumulates_locally(comm: Comm, strategy: Strategy) -> bool:
    """Whether micro-batches are summed on each rank before one allreduce a step: NO_SHARD, fast."""
    return not strategy.shards_moments and not comm.exact and comm.size > 1


def read_only(whole: Array | None) -> Array | None:
    """A view of what all ranks see, through which this one cannot write."""
    if whole is None:
        return None
    view = whole.view()
    if not device.is_cupy(view):  # which has no such flag
        view.flags.writeable = False
    return view


class ShardedUnit:
    """One rank's part of a unit. Buffers of gathered parameters and of gradients come from two pools.

    `whole`: memory for the unit's length that all ranks see, or None. Buffers and wholes are float32 arrays,
    of which less is used in low precision. `masters`: makes what holds float32 parameters there, if that is
    not to be on the device.
    """

    def __init__(
        self,
        unit: Unit,
        comm: Comm,
        strategy: Strategy,
        parameters: BufferPool,
        gradients: BufferPool,
        whole: Array | None = None,
        precision: Precision = FP32,
        masters: Callable[[int], Array] | None = None,
    ) -> None:
        self.unit, self.comm, self.strategy, self.precision = unit, comm, strategy, precision
        self._parameter_pool, self._gradient_pool = parameters, gradients
        self.partition = unit.partition(comm.size)
        self.part = self.partition.part(comm.rank)
        self._views: dict[int, Views] = {}
        self._zeros = device.in_use().zeros
        parameters_of_all = None  # in a memory that all ranks see
        if whole is not None and strategy.shards_moments:
            parameters_of_all = as_kind(whole, unit.length, precision.compute)
        self._common = read_only(parameters_of_all)
        self.in_use = False  # whether a rank may have read the common parameters since all ranks last met
        self.full: Array | None = self._common
        if strategy.shards_parameters:
            self.full = None
        elif self._common is None:
            self.full = self._zeros(unit.length, precision.compute)
        # What travels: the slice of the parameters in the type of computing.
        self.rounded = self._own(self.full if self._common is None else parameters_of_all, precision.compute)
        self.shard = self.rounded
        self._master: Array | None = None  # float32 of all that this rank updates, where `rounded` is not
        if precision.is_low:
            make = masters or self._zeros
            self._master = make(self._updated_part.stop - self._updated_part.start)
            first = self.part.start - self._updated_part.start
            self.shard = self._master[first : first + self.part.stop - self.part.start]
        self._buffer: Array | None = None
        self._gather: Handle | None = None
        keeps_gradient = unit.trainable and not strategy.shards_moments
        self._common_gradient = read_only(whole) if keeps_gradient else None
        self.full_gradient: Array | None = self._common_gradient
        if keeps_gradient and whole is None:
            self.full_gradient = self._zeros(unit.length)
        self._allreduces = keeps_gradient and accumulates_locally(comm, strategy)
        self.gradient = self._zeros(0)
        if unit.trainable:
            shared = whole if keeps_gradient else None
            self.gradient = self._own(self.full_gradient if self._allreduces else shared)
        self._gradient_buffer: Array | None = None  # lent by the pool
        self._whole_gradient = self._zeros(0)  # of this round
        self._gradient_views: Views | None = None
        self._reduce: Handle | None = None
        self.contributions = 0  # rounds that are in `gradient`

    def _own(self, full: Array | None, kind: Any = np.float32) -> Array:
        """This rank's slice of `full`, or one of its own."""
        return self._zeros(self.part.stop - self.part.start, kind) if full is None else full[self.part]

    @property
    def _updated_part(self) -> slice:
        """Which part of the unit this rank's optimizer works on."""
        return self.part if self.strategy.shards_moments else slice(0, self.unit.length)

    # ------------------------------------------------------------------------------------- parameters

    @property
    def gathered(self) -> bool:
        """Whether the whole is here, or on its way."""
        return self.full is not None

    @property
    def keeps_slice(self) -> bool:
        """Whether this rank writes its slice of the parameters alone; otherwise it writes all of them."""
        return self.strategy.shards_parameters or self._common is not None

    def start_gather(self) -> None:
        """Start to bring the whole of the parameters here, unless they are."""
        if self._common is not None:
            self.full = self._common
        elif self.full is None:
            self._buffer = self._parameter_pool.take(floats(self.unit.length, self.precision.compute))
            self.full = as_kind(self._buffer, self.unit.length, self.precision.compute)
            self._gather = self.comm.allgather(
                self.rounded, self.full, self.partition, f"parameters {self.name}"
            )

    def start_update(self) -> None:
        """Start to bring the other ranks' updated slices here where the whole is kept (SHARD_GRAD_OP)."""
        assert not self.strategy.shards_parameters, "only what stays whole is updated in place"
        assert self.full is not None
        if self._common is not None:
            return  # they are there as soon as they are published
        self._gather = self.comm.allgather(None, self.full, self.partition, f"parameters {self.name}")

    def wait_gather(self) -> None:
        """Return when the parameters are whole."""
        if self._common is not None:
            self.in_use = True
            self.comm.await_published()
        self.wait_update()

    def wait_update(self) -> None:
        """Return when what was started to bring parameters here is done, without the wish to read them."""
        if self._gather is not None:
            self._gather.wait()
            self._gather = None

    def weights(self) -> Views:
        """Name -> view of the gathered parameters, in full shape."""
        assert self.full is not None, f"unit {self.name} is not gathered"
        assert self._gather is None, f"unit {self.name} is used before its gather is waited for"
        key = id(self._buffer)
        if key not in self._views:
            self._views[key] = self.unit.views(self.full)
        return self._views[key]

    def release(self) -> None:
        """Give up the gathered whole; the slice stays."""
        if self._buffer is not None:
            self.wait_gather()
            self._parameter_pool.give(self._buffer)
            self._buffer = None
        if self.strategy.shards_parameters:
            self.full = None

    # -------------------------------------------------------------------------------------- gradients

    def gradients(self) -> Views:
        """Name -> view to add gradients into; zeros at the first call of a round."""
        if not self.unit.trainable:
            return {}
        if self._gradient_views is None:
            self._gradient_views = self._open()
        return self._gradient_views

    def _open(self) -> Views:
        self.wait_reduce()
        kind = self.precision.reduce
        widens = kind != np.float32  # then the sum is another array than what is summed
        if self.full_gradient is not None and self._common_gradient is None and not widens:
            buffer = self.full_gradient
        elif self.comm.sums_in_place and self.contributions == 0 and not widens:
            buffer = self.gradient
        else:
            buffer = self._gradient_buffer = self._gradient_pool.take(floats(self.unit.length, kind))
        self._whole_gradient = as_kind(buffer, self.unit.length, kind)
        self._whole_gradient.fill(0)
        key = id(buffer)
        if key not in self._views:
            self._views[key] = self.unit.views(self._whole_gradient)
        return self._views[key]

    def start_reduce(self, contributors: int) -> None:
        """Start to sum this round's gradients over ranks into the slices of their owners."""
        if self._allreduces and self.contributions:
            raise ValueError(
                "gradients of this step are already reduced; with fast no-shard pass "
                "last=False to backward for every micro-batch but the last"
            )
        self.gradients()
        whole, self._gradient_views = self._whole_gradient, None
        label = f"gradients {self.name}"
        if self._allreduces:
            self._reduce = self.comm.allreduce(whole, label)
        else:
            self._reduce = self.comm.reduce_scatter(
                whole,
                self.gradient,
                self.partition,
                contributors=contributors,
                accumulate=self.contributions > 0,
                label=label,
            )
        self.contributions += 1

    def wait_reduce(self) -> None:
        """Return when the reduction that was started is complete."""
        if self._reduce is not None:
            self._reduce.wait()
            self._reduce = None
            if self._gradient_buffer is not None:
                self._gradient_pool.give(self._gradient_buffer)
                self._gradient_buffer = None

    def start_gradient_gather(self) -> Handle:
        """Start to bring the whole of the summed gradient to every rank (NO_SHARD)."""
        if self.full_gradient is None or self._allreduces or self._common_gradient is not None:
            return DONE  # a common one is whole when the reduction is complete
        label = f"gradients {self.name}"
        return self.comm.allgather(self.gradient, self.full_gradient, self.partition, label)

    def reset(self) -> None:
        """Forget the gradient; the next round starts from zero."""
        self.wait_reduce()
        self.contributions = 0

    @property
    def updated(self) -> tuple[Array, Array, slice]:
        """What the optimizer works on: parameters, gradients, and which part of the unit they are."""
        if self.full_gradient is None:
            return self.shard, self.gradient, self.part
        parameters = self.full if self._master is None else self._master
        assert parameters is not None
        return parameters, self.full_gradient, self._updated_part

    @property
    def rounds_to(self) -> Array | None:
        """Where what the optimizer updates must be rounded to, or None where it is what layers read."""
        if self._master is None:
            return None
        return self.rounded if self.strategy.shards_moments else self.full

    @property
    def kept(self) -> tuple[Array, slice]:
        """The parameters that this rank keeps between steps, float32, and which part of the unit they are."""
        if self._master is not None:
            return self._master, self._updated_part
        if self.keeps_slice:
            return self.shard, self.part
        assert self.full is not None
        return self.full, slice(0, self.unit.length)

    @property
    def filled(self) -> list[tuple[Array, slice]]:
        """All that a rank fills by itself when parameters are loaded, and which parts of the unit it is."""
        if self._master is None or self.rounds_to is None:
            return [self.kept]
        if self._common is None and self.full is not None:  # whole on every rank: nobody brings the rest
            return [self.kept, (self.full, slice(0, self.unit.length))]
        return [self.kept, (self.rounds_to, self._updated_part)]

    def round(self) -> None:
        """Round what this rank keeps to what layers read, after others than the optimizer wrote it."""
        if self.rounds_to is not None:
            device.in_use().copy(self.rounds_to, self._master)

    @property
    def name(self) -> str:
        """The unit's name."""
        return self.unit.name

    def scale_gradient(self, factor: float) -> None:
        """Multiply the summed gradient by `factor`, wherever it is kept. Collective; after the norm."""
        self.gradient *= factor
        if self._common_gradient is not None:
            self.comm.publish()
            self.comm.await_published()
        elif self.full_gradient is not None and not self._allreduces:
            self.full_gradient *= factor
