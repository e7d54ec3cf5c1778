"""Optimizer state in host memory that is copied to the GPU and back, in chunks, for each update.

Moments, and float32 parameters if layers read low precision, are used once per step and are kept in pinned
memory. One stream copies a chunk to the GPU, the compute stream updates it and a third stream copies it back;
events order the three, so transfers overlap. Results are bit-identical to updates without offload.
(ZeRO-Offload, Ren et al., 2021, updates on the host; with today's links to a GPU, that is slower.)
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from zero_mpi.device import Cuda
from zero_mpi.device.arrays import address
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError
from zero_mpi.sharding.parameters import CHOICES, NONE, STATE, gpu_to_spare, pinned_zeros

CHUNK_ELEMENTS = 4 << 20  # elements of each state in a chunk: 16 MiB
BUFFER_SETS = 3  # sets of buffers: one is filled, one updated, one copied back


def chunk_of(quantum: int) -> int:
    """Return the number of elements of a chunk: a positive multiple of `quantum`."""
    return max(1, CHUNK_ELEMENTS // quantum) * quantum


class HostState(Mapping[str, Array]):
    """Named states of this rank's part of a unit, in pinned memory: flat, initially zero.

    Chunks begin at multiples of `quantum`. Reading a state waits for copies in progress.
    """

    def __init__(self, where: Cuda, size: int, quantum: int, names: Sequence[str]) -> None:
        self.size, self.chunk = size, chunk_of(quantum)
        arrays = pinned_zeros(where, len(names) * size).reshape(len(names), size)
        self._arrays = dict(zip(names, arrays, strict=True))
        self.stored = where.cupy.cuda.Event(block=True, disable_timing=True)  # end of the last copy to host

    def __getitem__(self, name: str) -> Array:
        self.stored.synchronize()
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def chunks(self) -> Iterator[tuple[slice, list[Array]]]:
        """Yield (part, this part of each state), without waiting for copies."""
        for start in range(0, self.size, self.chunk):
            part = slice(start, min(start + self.chunk, self.size))
            yield part, [array[part] for array in self._arrays.values()]


class GpuBuffers:
    """Buffers on the GPU for a chunk of each array, with events that order the three streams' use of them."""

    def __init__(self, where: Cuda, size: int, arrays: int) -> None:
        event = where.cupy.cuda.Event
        self.arrays = [where.empty(size) for _ in range(arrays)]
        self.filled, self.updated, self.emptied = (event(disable_timing=True) for _ in range(3))


class Offload:
    """Transfer of states to the GPU and back, with three sets of buffers and one stream per direction.

    `masters`: True if float32 parameters are transferred too.
    """

    def __init__(self, where: Cuda, masters: bool = False) -> None:
        self.where, self.masters = where, masters
        self.buffers: list[GpuBuffers] = []
        self._cuda = where.cupy.cuda
        self._up, self._down = (self._cuda.Stream(non_blocking=True) for _ in range(2))
        self._turn = 0

    def states(self, sizes: Iterable[tuple[int, int, Sequence[str]]]) -> list[HostState]:
        """Return a HostState for each (elements, quantum, names); allocate buffers for the longest chunk."""
        host_states = [HostState(self.where, *size) for size in sizes]
        longest = max((min(states.size, states.chunk) for states in host_states), default=0)
        arrays = max((len(states) for states in host_states), default=0) + self.masters
        self.buffers = [GpuBuffers(self.where, longest, arrays) for _ in range(BUFFER_SETS)]
        self.where.synchronize()  # the compute stream may still use this memory
        return host_states

    def through(self, states: HostState, *more: Array) -> Iterator[tuple[slice, list[Array]]]:
        """Yield (part, arrays on the GPU) chunk by chunk: the states, and `more` host arrays of equal length.

        The caller launches work that may change the arrays. The next iteration copies them back.
        """
        self._up.wait_event(states.stored)  # wait for the chunks of the previous step
        for part, chunk in states.chunks():
            on_host = [*chunk, *(array[part] for array in more)]
            buffer, self._turn = self.buffers[self._turn], (self._turn + 1) % BUFFER_SETS
            on_gpu = [array[: part.stop - part.start] for array in buffer.arrays[: len(on_host)]]
            self._up.wait_event(buffer.emptied)
            self._copy(on_gpu, on_host, self._cuda.runtime.memcpyHostToDevice, self._up)
            buffer.filled.record(self._up)
            self.where.stream.wait_event(buffer.filled)
            yield part, on_gpu
            buffer.updated.record(self.where.stream)
            self._down.wait_event(buffer.updated)
            self._copy(on_host, on_gpu, self._cuda.runtime.memcpyDeviceToHost, self._down)
            buffer.emptied.record(self._down)
        states.stored.record(self._down)

    def finish(self) -> None:
        """Wait until all chunks are copied back. Reading a state waits too; reading parameters does not."""
        self._down.synchronize()

    def _copy(self, targets: list[Array], sources: list[Array], kind: int, stream: Any) -> None:
        """Copy arrays by address on `stream`, because `ndarray.set` and `get` may wait."""
        for target, source in zip(targets, sources, strict=True):
            self._cuda.runtime.memcpyAsync(address(target), address(source), source.nbytes, kind, stream.ptr)


def make_offload(name: str) -> Offload | None:
    """Return the offload for `--offload NAME`; raise UsageError for an unknown name or without a GPU."""
    if name not in CHOICES:
        raise UsageError(f"--offload {name}: expected one of {', '.join(CHOICES)}")
    return None if name == NONE else Offload(gpu_to_spare(name), masters=name == STATE)
