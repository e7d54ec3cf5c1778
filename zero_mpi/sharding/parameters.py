"""The parameters of a unit on one rank: the slice that it keeps, and the whole, which layers read.

There are three ways to have the whole: gathered for a while (`ShardedParameters`), kept on every rank
(`ReplicatedParameters`), and in memory that the ranks of a node share (`NodeSharedParameters`), where
gathering is waiting for what the others write. In low precision the whole and what travels are of the low
type, and `master` has float32 of what this rank updates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from zero_mpi import device
from zero_mpi.comm import Comm, Handle
from zero_mpi.device.arrays import BufferPool, read_only
from zero_mpi.device.types import Array
from zero_mpi.sharding.precision import FP32, Precision, as_kind, floats
from zero_mpi.sharding.strategy import Strategy
from zero_mpi.sharding.unit import Unit

Views = dict[str, Array]


def joined(views: list[Views]) -> Views:
    """Return the views of several units as one; those of a single unit as they are."""
    return views[0] if len(views) == 1 else {name: view for each in views for name, view in each.items()}


@dataclass(frozen=True)
class Context:
    """Common data of the units of a module: who owns slices, and where buffers come from.

    parameters, gradients   pools of float32 buffers, of which less is used in low precision
    masters                 makes arrays for float32 parameters in low precision, if not the device
    unpacked                pool for arrays unpacked from gathered bytes into the type of computing
    """

    comm: Comm
    strategy: Strategy
    parameters: BufferPool
    gradients: BufferPool
    precision: Precision = FP32
    masters: Callable[[int], Array] | None = None
    unpacked: BufferPool = field(default_factory=BufferPool)


class Parameters(ABC):
    """Base of all ways to have the whole.

    own       this rank's slice in the type of computing: what travels
    master    float32 of all that this rank updates; None if `own` is float32
    in_use    whether a rank may have read the whole since all ranks last met (`NodeSharedParameters`)
    """

    in_use = False

    def __init__(self, unit: Unit, context: Context, own: Array, whole: Array | None) -> None:
        self.unit, self.context, self.own, self.whole = unit, context, own, whole
        self.partition = unit.partition(context.comm.size)
        self.part = self.partition.part(context.comm.rank)
        self.master: Array | None = None
        if context.precision.is_low:
            self._make_master()
        self._label = f"parameters {unit.name}"
        self._views: dict[int, Views] = {}

    def _make_master(self) -> None:
        make = self.context.masters or device.in_use().zeros
        self.master = make(self.updated_part.stop - self.updated_part.start)

    # -------------------------------------------------------------------------------- the whole, for layers

    @abstractmethod
    def start_gather(self) -> None:
        """Start to bring the whole here, unless it is here."""

    @abstractmethod
    def wait_gather(self) -> None:
        """Return when the whole may be read."""

    @abstractmethod
    def release(self) -> None:
        """Give up the whole; the slice stays."""

    def start_update(self) -> None:  # noqa: B027  (nothing to bring is a sound answer)
        """Start to bring the other ranks' updated slices here, where the whole is kept."""

    def wait_update(self) -> None:  # noqa: B027
        """Return when transfers of parameters to this rank are done, without a wish to read these."""

    def views(self) -> Views:
        """Return name -> view of the whole, in full shape."""
        assert self.whole is not None, f"unit {self.unit.name} is not gathered"
        key = id(self._memory)
        if key not in self._views:
            self._views[key] = self.unit.views(self.whole)
        return self._views[key]

    def copy_of(self, name: str) -> Array:
        """Return a copy of one whole parameter, where its slices are kept. Collective."""
        if self.master is not None:  # which is never gathered in training
            whole = device.home_of(self.shard).empty(self.unit.length)
            self.context.comm.allgather(self.shard, whole, self.partition, self._label).wait()
            return self.unit.views(whole)[name]
        was_gathered = self.is_gathered
        self.start_gather()
        self.wait_gather()
        copy = self.views()[name].copy()
        if not was_gathered:
            self.release()
        return copy

    @property
    def is_gathered(self) -> bool:
        """Return whether the whole is here, or on its way."""
        return self.whole is not None

    @property
    def _memory(self) -> Array:
        """The array that the whole lies in, which is there as long as the module is."""
        return self.whole

    # --------------------------------------------------------------------------- the slice, for the optimizer

    @property
    def updated_part(self) -> slice:
        """The part of the unit that this rank's optimizer works on."""
        return self.part if self.context.strategy.shards_moments else slice(0, self.unit.length)

    @property
    def written(self) -> tuple[Array, slice]:
        """The array of what layers read that this rank writes, and which part of the unit it is."""
        return self.own, self.part

    @property
    def rounds_to(self) -> Array | None:
        """The array that `master` is rounded to after an update; None if layers read what is updated."""
        return None if self.master is None else self._updated_of_whole

    @property
    def _updated_of_whole(self) -> Array:
        return self.own

    @property
    def updated(self) -> Array:
        """The float32 array that the optimizer works on: `updated_part` of the unit."""
        return self._updated_of_whole if self.master is None else self.master

    @property
    def shard(self) -> Array:
        """This rank's slice in float32."""
        first = self.part.start - self.updated_part.start
        return self.own if self.master is None else self.master[first : first + self.own.size]

    @property
    def kept(self) -> tuple[Array, slice]:
        """The parameters that this rank keeps between steps, float32, and which part of the unit they are."""
        return self.written if self.master is None else (self.master, self.updated_part)

    @property
    def filled(self) -> list[tuple[Array, slice]]:
        """All that a rank fills by itself when parameters are loaded, and which parts of the unit it is."""
        return [self.written] if self.master is None else [self.kept, self.written]

    @property
    def elements(self) -> slice:
        """The elements of the unit that this rank owns."""
        return self.part

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept between steps."""
        return int(self.kept[0].nbytes)

    @property
    def nbytes_whole(self) -> int:
        """Bytes that would be kept without sharding."""
        return self.unit.length * int(self.shard.itemsize)

    def round(self) -> None:
        """Round `master` to what layers read, after others than the optimizer wrote it."""
        if self.rounds_to is not None:
            device.in_use().copy(self.rounds_to, self.master)

    def publish(self) -> None:
        """Round `shard` after it was written, and start to bring it to ranks that keep the whole."""
        if self.master is not None and not self.context.strategy.shards_moments:  # all ranks keep all of it
            self.context.comm.allgather(None, self.master, self.partition, self._label).wait()
        self.round()
        self.start_update()


class ShardedParameters(Parameters):
    """The rank keeps its slice only; a buffer is borrowed for the whole between gather and release."""

    def __init__(self, unit: Unit, context: Context) -> None:
        part = unit.partition(context.comm.size).part(context.comm.rank)
        own = device.in_use().zeros(part.stop - part.start, context.precision.compute)
        super().__init__(unit, context, own, None)
        self._buffer: Array | None = None
        self._gather: Handle | None = None

    def start_gather(self) -> None:
        if self._buffer is None:
            kind, pool = self.context.precision.compute, self.context.parameters
            self._buffer = pool.take(floats(self.unit.length, kind))
            self.whole = as_kind(self._buffer, self.unit.length, kind)
            self._gather = self.context.comm.allgather(self.own, self.whole, self.partition, self._label)

    def wait_gather(self) -> None:
        if self._gather is not None:
            self._gather.wait()
            self._gather = None

    wait_update = wait_gather

    def views(self) -> Views:
        assert self._gather is None, f"unit {self.unit.name} is used before its gather is waited for"
        return super().views()

    @property
    def _memory(self) -> Array:
        return self._buffer

    def release(self) -> None:
        if self._buffer is not None:
            self.wait_gather()
            self.context.parameters.give(self._buffer)
            self._buffer = self.whole = None


class ReplicatedParameters(Parameters):
    """Every rank keeps the whole; under SHARD_GRAD_OP it brings the updated slices of others here."""

    whole: Array

    def __init__(self, unit: Unit, context: Context) -> None:
        whole = device.in_use().zeros(unit.length, context.precision.compute)
        part = unit.partition(context.comm.size).part(context.comm.rank)
        super().__init__(unit, context, whole[part], whole)
        self._update: Handle | None = None

    def start_gather(self) -> None:
        """Do nothing: the whole is here."""

    def wait_gather(self) -> None:
        self.wait_update()

    def release(self) -> None:
        """Do nothing: the whole stays."""

    def start_update(self) -> None:
        self._update = self.context.comm.allgather(None, self.whole, self.partition, self._label)

    def wait_update(self) -> None:
        if self._update is not None:
            self._update.wait()
            self._update = None

    @property
    def written(self) -> tuple[Array, slice]:
        return self.whole, slice(0, self.unit.length)

    @property
    def _updated_of_whole(self) -> Array:
        return self.whole[self.updated_part]


class NodeSharedParameters(Parameters):
    """The whole lies once for all ranks: each writes its slice, and reads the rest when it is published."""

    def __init__(self, unit: Unit, context: Context, memory: Array) -> None:
        whole = as_kind(memory, unit.length, context.precision.compute)
        part = unit.partition(context.comm.size).part(context.comm.rank)
        self._common = read_only(whole)
        stays = not context.strategy.shards_parameters
        super().__init__(unit, context, whole[part], self._common if stays else None)

    def start_gather(self) -> None:
        self.whole = self._common

    def wait_gather(self) -> None:
        self.in_use = True
        self.context.comm.wait_written()

    def release(self) -> None:
        if self.context.strategy.shards_parameters:
            self.whole = None


def make_parameters(unit: Unit, context: Context, memory: Array | None) -> Parameters:
    """Return the parameters of a unit under a strategy; `memory`: float32 that all ranks see, or None."""
    if memory is not None and context.strategy.shards_moments:
        return NodeSharedParameters(unit, context, memory)
    return (ShardedParameters if context.strategy.shards_parameters else ReplicatedParameters)(unit, context)
