"""A unit at run time on one rank: its slice of the parameters, the gathered whole, and the gradients.

Parameters: `start_gather`, `wait_gather`, use of `weights`, `release`. Gradients: use of `gradients`,
`start_reduce`, `wait_reduce`, after which `gradient` is this rank's slice of the sum. What is not sharded
takes the same calls, which then have nothing to do. Where the transport gives one array to all ranks, that is
the whole of the parameters (of the summed gradient, where parameters are replicated): of it a rank writes its
slice and reads the rest, and gathering is waiting for what the others write.
"""

from __future__ import annotations

from zero_mpi.arrays import Array, BufferPool, zeros
from zero_mpi.comm import DONE, Comm, Handle
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
    view.flags.writeable = False
    return view


class ShardedUnit:
    """One rank's part of a unit. Buffers of gathered parameters and of gradients come from two pools.

    `whole`: an array of the unit's length that all ranks see, or None.
    """

    def __init__(
        self,
        unit: Unit,
        comm: Comm,
        strategy: Strategy,
        parameters: BufferPool,
        gradients: BufferPool,
        whole: Array | None = None,
    ) -> None:
        self.unit, self.comm, self.strategy = unit, comm, strategy
        self._parameter_pool, self._gradient_pool = parameters, gradients
        self.partition = unit.partition(comm.size)
        self.part = self.partition.part(comm.rank)
        self._views: dict[int, Views] = {}
        self._common = read_only(whole) if strategy.shards_moments else None  # parameters of all ranks
        self.in_use = False  # whether a rank may have read the common parameters since all ranks last met
        self.full: Array | None = self._common
        if strategy.shards_parameters:
            self.full = None
        elif self._common is None:
            self.full = zeros(unit.length)
        self.shard = self._own(self.full if self._common is None else whole)
        self._buffer: Array | None = None
        self._gather: Handle | None = None
        keeps_gradient = unit.trainable and not strategy.shards_moments
        self._common_gradient = read_only(whole) if keeps_gradient else None
        self.full_gradient: Array | None = self._common_gradient
        if keeps_gradient and whole is None:
            self.full_gradient = zeros(unit.length)
        self._allreduces = keeps_gradient and accumulates_locally(comm, strategy)
        self.gradient = zeros(0)
        if unit.trainable:
            shared = whole if keeps_gradient else None
            self.gradient = self._own(self.full_gradient if self._allreduces else shared)
        self._gradient_buffer: Array | None = None  # lent by the pool
        self._whole_gradient = zeros(0)  # of this round
        self._gradient_views: Views | None = None
        self._reduce: Handle | None = None
        self.contributions = 0  # rounds that are in `gradient`

    def _own(self, full: Array | None) -> Array:
        """This rank's slice of `full`, or one of its own."""
        return zeros(self.part.stop - self.part.start) if full is None else full[self.part]

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
            self._buffer = self._parameter_pool.take(self.unit.length)
            self.full = self._buffer[: self.unit.length]
            self._gather = self.comm.allgather(
                self.shard, self.full, self.partition, f"parameters {self.name}"
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
        if self.full_gradient is not None and self._common_gradient is None:
            buffer = self.full_gradient
        elif self.comm.sums_in_place and self.contributions == 0:
            buffer = self.gradient
        else:
            buffer = self._gradient_buffer = self._gradient_pool.take(self.unit.length)
        self._whole_gradient = buffer[: self.unit.length]
        self._whole_gradient.fill(0)
        key = id(buffer)
        if key not in self._views:
            self._views[key] = self.unit.views(buffer)
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
        if self.full_gradient is not None:
            assert self.full is not None
            return self.full, self.full_gradient, slice(0, self.unit.length)
        return self.shard, self.gradient, self.part

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
