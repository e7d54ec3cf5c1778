"""Optimizer state in host memory that is copied to the GPU and back, in pieces, when it is updated.

Moments, and float32 parameters if layers read low precision, are used once per step and are kept in pinned
memory. One stream copies a piece to the GPU, the compute stream updates it and a third copies it back; events
order the three, so transfers overlap. The update of each element has the same bits. (ZeRO-Offload, Ren et
al., 2021, updates on the host; a GPU's link is too fast for that to pay.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from zero_mpi.device import Cuda
from zero_mpi.device.arrays import address
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError
from zero_mpi.sharding.host_masters import CHOICES, NONE, STATE, gpu_to_spare, pinned_zeros

PIECE_ELEMENTS = 4 << 20  # elements of each state in a piece: 16 MiB
ROOMS = 3  # sets of buffers: one is filled, one updated, one emptied


def piece_of(quantum: int) -> int:
    """Return the number of elements of a piece: a positive multiple of `quantum`."""
    return max(1, PIECE_ELEMENTS // quantum) * quantum


class HostState(Mapping[str, Array]):
    """Named states of one unit's part in pinned memory: flat, initially zero.

    `quantum`: pieces begin at its multiples. Reading a state waits for copies that are under way.
    """

    def __init__(self, where: Cuda, size: int, quantum: int, names: Sequence[str]) -> None:
        self.size, self.piece, self.names = size, piece_of(quantum), names
        self._all = pinned_zeros(where, len(names) * size)
        self.stored = where.cupy.cuda.Event(block=True, disable_timing=True)  # end of the last copy to host

    def __getitem__(self, name: str) -> Array:
        first = self.names.index(name) * self.size
        self.stored.synchronize()
        return self._all[first : first + self.size]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def pieces(self) -> Iterator[tuple[slice, list[Array]]]:
        """Yield (part, that part of each state), without waiting for copies."""
        for start in range(0, self.size, self.piece):
            stop = min(start + self.piece, self.size)
            firsts = range(0, len(self.names) * self.size, self.size)
            yield slice(start, stop), [self._all[first + start : first + stop] for first in firsts]


class GpuRoom:
    """Buffers on the GPU for a piece of each array, and the events of the streams that use them in turn."""

    def __init__(self, where: Cuda, size: int, arrays: int) -> None:
        event = where.cupy.cuda.Event
        self.arrays = [where.empty(size) for _ in range(arrays)]
        self.filled, self.updated, self.emptied = (event(disable_timing=True) for _ in range(3))


class Offload:
    """Transfers of the state to the GPU and back: three sets of buffers in turn, one stream per direction.

    `masters`: True if float32 parameters are transferred too.
    """

    def __init__(self, where: Cuda, masters: bool = False) -> None:
        self.where, self.masters = where, masters
        self.rooms: list[GpuRoom] = []
        self._cuda = where.cupy.cuda
        self._up, self._down = (self._cuda.Stream(non_blocking=True) for _ in range(2))
        self._turn = 0

    def states(self, sizes: Iterable[tuple[int, int, Sequence[str]]]) -> list[HostState]:
        """Return a state for each (elements, quantum, names); allocate buffers for the longest piece."""
        made = [HostState(self.where, *size) for size in sizes]
        longest = max((min(states.size, states.piece) for states in made), default=0)
        arrays = max((len(states) for states in made), default=0) + self.masters
        self.rooms = [GpuRoom(self.where, longest, arrays) for _ in range(ROOMS)]
        self.where.synchronize()  # the compute stream may still use the memory of the buffers
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers on the GPU."""
        return int(sum(array.nbytes for room in self.rooms for array in room.arrays))

    def through(self, states: HostState, *more: Array) -> Iterator[tuple[slice, list[Array]]]:
        """Yield (part, states and more) on the GPU, piece by piece; `more`: host arrays, as long as a state.

        GPU work launched before the next piece is requested may change the arrays; they are copied back.
        """
        self._up.wait_event(states.stored)  # the pieces of the step before
        for part, own in states.pieces():
            there = [*own, *(array[part] for array in more)]
            room, self._turn = self.rooms[self._turn], (self._turn + 1) % ROOMS
            here = [array[: part.stop - part.start] for array in room.arrays[: len(there)]]
            self._up.wait_event(room.emptied)
            self._copy(here, there, self._cuda.runtime.memcpyHostToDevice, self._up)
            room.filled.record(self._up)
            self.where.stream.wait_event(room.filled)
            yield part, here
            room.updated.record(self.where.stream)
            self._down.wait_event(room.updated)
            self._copy(there, here, self._cuda.runtime.memcpyDeviceToHost, self._down)
            room.emptied.record(self._down)
        states.stored.record(self._down)

    def finish(self) -> None:
        """Wait until all pieces are copied back: reads of states do this, but reads of parameters do not."""
        self._down.synchronize()

    def _copy(self, targets: list[Array], sources: list[Array], kind: int, stream: Any) -> None:
        """Copy arrays by address, because `ndarray.set` and `get` choose a stream and may wait."""
        for target, source in zip(targets, sources, strict=True):
            self._cuda.runtime.memcpyAsync(address(target), address(source), source.nbytes, kind, stream.ptr)


def make_offload(name: str) -> Offload | None:
    """Return the offload of a value of `--offload`; raise UsageError for an unknown one or without a GPU."""
    if name not in CHOICES:
        raise UsageError(f"--offload {name}: expected one of {', '.join(CHOICES)}")
    return None if name == NONE else Offload(gpu_to_spare(name), masters=name == STATE)
