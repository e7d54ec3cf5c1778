"""Parameters of a unit on one rank: the shard that the rank keeps, and full parameters for layers.

There are four kinds of full parameters: gathered when needed (`Parameters`), kept on every rank
(`ReplicatedParameters`), in the shared memory of a node (`NodeSharedParameters`, where a gather waits until
all ranks have written), and unpacked from gathered quantized blocks (`BlockParameters`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any, NoReturn

import numpy as np

from zero_mpi import device, ops
from zero_mpi.comm import Comm, Handle
from zero_mpi.device import Cuda
from zero_mpi.device.arrays import BufferPool, read_only
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError
from zero_mpi.ops.packed_matrix import PackedStack
from zero_mpi.sharding.precision import FLOAT32, FP32, Precision, as_kind, floats
from zero_mpi.sharding.strategy import Strategy
from zero_mpi.sharding.unit import BlockUnit, Unit

NONE, MOMENTS, STATE = CHOICES = ("none", "moments", "state")  # values of --offload
Views = dict[str, Array]
ReadBytes = Callable[[str, int, Array], object]  # (name, start, out): reads bytes into `out`


class State(Enum):
    """State of a unit's full parameters: absent, being gathered, or present on this rank."""

    SHARDED, GATHERING, FULL = "sharded", "gathering", "full"


def union(views: list[Views]) -> Views:
    return views[0] if len(views) == 1 else {name: view for each in views for name, view in each.items()}


@dataclass(frozen=True)
class Context:
    """Objects that the units of a module share: transport, settings, and pools of float32 buffers.

    unpacked   pool of arrays for parameters that are unpacked from gathered bytes
    masters    function that allocates the float32 parameters of low-precision runs; None: on the device
    units_read units whose shared parameters some rank may have read since the last barrier
    """

    comm: Comm
    strategy: Strategy
    parameters: BufferPool
    gradients: BufferPool
    unpacked: BufferPool
    precision: Precision
    masters: Callable[[int], Array] | None
    units_read: set[str] = field(default_factory=set)


class Parameters:
    """Arrays of a unit's parameters. This base class keeps only the rank's shard.

    shard    this rank's `part` of the unit in the compute dtype; gathers send it
    full     the full unit in the compute dtype, while it is gathered
    master   float32 array of `master_part`, which this rank updates; if layers compute in float32, a
             view of `shard` or `full`
    low      array to which `master` is rounded after an update; None if layers read the updated array
    """

    state = State.SHARDED
    master: Array
    low: Array | None = None

    def __init__(self, unit: Unit, context: Context, full: Array | None = None) -> None:
        self.unit, self.context, self.full = unit, context, full
        self.partition = unit.partition(context.comm.size)
        self.part = self.partition.part(context.comm.rank)
        self.master_part = self.part if context.strategy.shards_moments else slice(0, unit.length)
        self._label = f"parameters {unit.name}"
        self._memory = full  # array that contains `full`, permanent or borrowed from a pool
        self._views: dict[int, Views] = {}
        self._transfer: Handle | None = None
        self._make_arrays()

    def _make_arrays(self) -> None:
        length = self.part.stop - self.part.start
        self.shard = device.in_use().zeros(length, self.context.precision.compute)
        self._make_master(self.shard)

    def _make_master(self, array: Array) -> None:
        """Set `master` to `array`, or in low precision to a new float32 array of the same length."""
        self.master = array
        if self.context.precision.is_low:
            make = self.context.masters or device.in_use().zeros
            self.master, self.low = make(array.size), array

    # -------------------------------------------------------------------- the full parameters, for layers

    def start_gather(self) -> None:
        if self.state is State.SHARDED:
            kind, pool = self.context.precision.compute, self.context.parameters
            self._memory = pool.take(floats(self.unit.length, kind))
            self.full = as_kind(self._memory, self.unit.length, kind)
            self._transfer = self.context.comm.allgather(self.shard, self.full, self.partition, self._label)
            self.state = State.GATHERING

    def wait_gather(self) -> None:
        self.wait_update()
        if self.state is State.GATHERING:
            self.state = State.FULL

    def release(self) -> None:
        if self.state is not State.SHARDED:
            self.wait_update()
            self.context.parameters.give(self._memory)
            self._memory, self.full, self.state = None, None, State.SHARDED

    def start_update(self) -> None:
        """Start the gather of updated shards, if this rank keeps the full parameters."""

    def wait_update(self) -> None:
        """Wait until all transfers of parameters to this rank are complete."""
        if self._transfer is not None:
            self._transfer.wait()
            self._transfer = None

    def views(self) -> Views:
        """Return name -> view of the full parameters, in full shape."""
        assert self.state is State.FULL, f"unit {self.unit.name} is {self.state.value}, expected full"
        key = id(self._memory)
        if key not in self._views:
            self._views[key] = self.unit.views(self.full)
        return self._views[key]

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Return a context with the full parameters; release them at the end if they were sharded."""
        was_sharded = self.state is State.SHARDED
        self.start_gather()
        self.wait_gather()
        yield
        if was_sharded:
            self.release()

    def copy_of(self, name: str) -> Array:
        """Return a copy of a full parameter, on the device of its shards. Collective."""
        if self.low is not None:  # gather the float32 parameters, which training never does
            full = device.home_of(self.master).empty(self.unit.length)
            self.context.comm.allgather(self.master_shard, full, self.partition, self._label).wait()
            return self.unit.views(full)[name]
        with self.gathered():
            return self.views()[name].copy()

    # ----------------------------------------------------------------- arrays that this rank keeps and writes

    @property
    def master_shard(self) -> Array:
        first = self.part.start - self.master_part.start
        return self.master[first : first + self.part.stop - self.part.start]

    @property
    def _layer_array(self) -> tuple[Array, slice]:
        """The persistent array that layers read, and the part of the unit that it holds."""
        return self.shard, self.part

    @property
    def load_targets(self) -> list[tuple[Array, slice]]:
        """Arrays that a load fills, each with the range of the unit that it holds."""
        masters = [] if self.low is None else [(self.master, self.master_part)]
        return [*masters, self._layer_array]

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters that this rank keeps between steps, counted once, in `Precision.master`."""
        return int(self.load_targets[0][0].nbytes)

    @property
    def nbytes_full(self) -> int:
        return self.partition.length * self.unit.kept_bytes(self.context.precision.master)

    def round(self) -> None:
        """Round `master` to `low`. Call this after code outside the optimizer writes `master`."""
        if self.low is not None:
            device.in_use().copy(self.low, self.master)

    def publish(self) -> None:
        """Round `master` after writes to its shard; on ranks that keep the full unit, start the gather."""
        if self.low is not None and not self.context.strategy.shards_moments:
            self.context.comm.allgather(None, self.master, self.partition, self._label).wait()
        self.round()
        self.start_update()


class ReplicatedParameters(Parameters):
    """Full parameters on every rank. Under SHARD_GRAD_OP, updated shards of other ranks are gathered."""

    state = State.FULL

    def __init__(self, unit: Unit, context: Context) -> None:
        super().__init__(unit, context, device.in_use().zeros(unit.length, context.precision.compute))

    def _make_arrays(self) -> None:
        assert self.full is not None
        self.shard = self.full[self.part]
        self._make_master(self.full[self.master_part])

    def release(self) -> None: ...

    def start_update(self) -> None:
        self._transfer = self.context.comm.allgather(None, self.full, self.partition, self._label)

    @property
    def _layer_array(self) -> tuple[Array, slice]:
        return self.full, slice(0, self.unit.length)


class NodeSharedParameters(Parameters):
    """Full parameters stored once per node. Each rank writes its shard and reads the other ranks' shards."""

    def __init__(self, unit: Unit, context: Context, memory: Array) -> None:
        self._node_array = as_kind(memory, unit.length, context.precision.compute)
        super().__init__(unit, context, read_only(self._node_array))
        self.release()

    def _make_arrays(self) -> None:
        self.shard = self._node_array[self.part]
        self._make_master(self.shard)

    def start_gather(self) -> None:
        if self.state is State.SHARDED:
            self.full, self.state = self._memory, State.GATHERING

    def wait_gather(self) -> None:
        self.context.units_read.add(self.unit.name)
        self.context.comm.wait_written()
        super().wait_gather()

    def release(self) -> None:
        if self.context.strategy.shards_parameters:
            self.full, self.state = None, State.SHARDED
        else:
            self.state = State.FULL


class BlockParameters(Parameters):
    """Frozen parameters that are kept, sharded and gathered as bytes of quantized blocks.

    The bytes form separate parameters of float32 words, which are sent like other parameters (`stored`). At
    the end of a gather, they are unpacked to arrays for layers, which a release frees. A rank thus has
    unpacked parameters of one or two units at a time. Layers unpack stacked matrices one at a time.
    """

    unit: BlockUnit

    def __init__(self, unit: BlockUnit, context: Context, memory: Array | None) -> None:
        self.stored = make_parameters(unit.words, replace(context, precision=FP32, masters=None), memory)
        super().__init__(unit, context)

    def _make_arrays(self) -> None:
        self.shard = self.stored.shard  # frozen parameters need no separate copy for updates

    def start_gather(self) -> None:
        if self.state is State.SHARDED:
            self.stored.start_gather()
            self.state = State.GATHERING

    def wait_gather(self) -> None:
        if self.state is not State.GATHERING:
            return
        self.stored.wait_gather()
        self.state = State.FULL
        if self.unit.stacks:
            return
        kind = self.context.precision.compute
        self._memory = self.context.unpacked.take(self.unit.unpacked_size(kind))
        self.full = as_kind(self._memory, self.unit.length, kind)
        for name, view in self.views().items():
            self._unpack(name, view)
        self.stored.release()

    def release(self) -> None:
        if self.full is not None:
            self.context.unpacked.give(self._memory)
        elif self.state is not State.SHARDED:
            self.stored.release()
        self._memory, self.full, self.state = None, None, State.SHARDED

    def views(self) -> Views:
        if not self.unit.stacks:
            return super().views()
        kind, stacks = self.context.precision.compute, dict[str, Any]()
        for name, param in self.unit.params.items():
            raw = self._raw(name).reshape(param.shape[0], -1)
            stacks[name] = PackedStack(raw, self.unit.kinds[name].name, param.shape, kind, kind)
        return stacks

    def _raw(self, name: str) -> Array:
        return self.stored.views()[name].view(np.uint8)[: self.unit.nbytes(name)]

    def _unpack(self, name: str, out: Array) -> None:
        ops.dequantize(self._raw(name), self.unit.kinds[name].name, out.reshape(-1))

    def copy_of(self, name: str) -> Array:
        copy = np.empty(self.unit.params[name].shape, np.float32)
        with self.stored.gathered():
            self._unpack(name, copy)
        return copy

    def load(self, read: ReadBytes) -> None:
        for target, part in self.stored.load_targets:
            for segment in self.unit.words.segments(part):
                name, start = segment.name, segment.offset * target.itemsize
                run = target[segment.where].view(np.uint8)[: self.unit.nbytes(segment.name) - start]
                read(name, self.unit.kinds[name].bytes_of(self.unit.firsts.get(name, 0)) + start, run)

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes

    @property
    def _layer_array(self) -> NoReturn:
        raise ValueError(
            f"unit {self.unit.name} is kept in quantized blocks, not in elements: fill it by "
            "load_stored, read it by all_gather_param or state_dict"
        )

    master = master_shard = _layer_array


def make_parameters(unit: Unit, context: Context, memory: Array | None) -> Parameters:
    """Return the parameters of a unit under a strategy; `memory`: shared float32 memory, or None."""
    if isinstance(unit, BlockUnit):
        return BlockParameters(unit, context, memory)
    if memory is not None and context.strategy.shards_moments:
        return NodeSharedParameters(unit, context, memory)
    return (Parameters if context.strategy.shards_parameters else ReplicatedParameters)(unit, context)


# --------------------------------------- float32 parameters in pinned memory, which the GPU can copy directly


def gpu_to_spare(name: str) -> Cuda:
    """Return the GPU in use. Raise UsageError if there is none."""
    gpu = device.in_use()
    if not isinstance(gpu, Cuda):
        raise UsageError(f"--offload {name}: expected a GPU, got the CPU; leave it out")
    return gpu


def masters_on_host(precision: Precision) -> Callable[[int], Array]:
    """Return a function that allocates zeros in pinned memory, for float32 parameters.

    Raises UsageError without a GPU, or if layers read the float32 parameters themselves.
    """
    gpu = gpu_to_spare(STATE)
    if not precision.is_low:
        reason = f"with --precision {precision.name} there are no separate fp32 weights"
        raise UsageError(f"--offload {STATE}: {reason}; use --offload {MOMENTS}, or bf16")
    return partial(pinned_zeros, gpu)


def pinned_zeros(gpu: Cuda, size: int) -> Array:
    array = gpu.pinned(size * FLOAT32.itemsize).view(FLOAT32)
    array.fill(0)
    return array
