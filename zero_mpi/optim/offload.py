"""State that lies in the host's memory and passes through the GPU in pieces when it is updated.

Moments, and float32 parameters where layers read low precision, are used once per step; here they lie in
pinned memory. A piece comes on one stream, is updated on the one that computes and goes back on a third;
events put the three in order, so that transfers overlap. The update of each element has the same bits.
(ZeRO-Offload, Ren et al., 2021, leaves the update to the host; a GPU's link is too fast for that to pay.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from zero_mpi.device import Cuda
from zero_mpi.device.arrays import address
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError
from zero_mpi.sharding.host_masters import CHOICES, NONE, STATE, gpu_to_spare, pinned_zeros

PIECE_ELEMENTS = 4 << 20  # elements of each state that pass at once: 16 MiB
ROOMS = 3  # one that is filled, one that is updated, one that is emptied


def piece_of(quantum: int) -> int:
    """Return the elements of a piece: whole runs of decay, so at least one."""
    return max(1, PIECE_ELEMENTS // quantum) * quantum


class HostState(Mapping[str, Array]):
    """The named states of one unit's part, flat, zeros at first, in pinned memory.

    `quantum`: pieces begin at its multiples. Reading a state waits for what is on its way there.
    """

    def __init__(self, where: Cuda, size: int, quantum: int, names: Sequence[str]) -> None:
        self.size, self.piece, self.names = size, piece_of(quantum), names
        self._all = pinned_zeros(where, len(names) * size)
        self.stored = where.cupy.cuda.Event(block=True, disable_timing=True)  # the last piece that went back

    def __getitem__(self, name: str) -> Array:
        first = self.names.index(name) * self.size
        self.stored.synchronize()
        return self._all[first : first + self.size]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def pieces(self) -> Iterator[tuple[slice, list[Array]]]:
        """Yield (part, that part of each state), whether its copies are complete or not."""
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
    """The way of the state through the GPU: three rooms that take turns, and a stream each way.

    `masters`: whether parameters pass as well.
    """

    def __init__(self, where: Cuda, masters: bool = False) -> None:
        self.where, self.masters = where, masters
        self.rooms: list[GpuRoom] = []
        self._cuda = where.cupy.cuda
        self._up, self._down = (self._cuda.Stream(non_blocking=True) for _ in range(2))
        self._turn = 0

    def states(self, sizes: Iterable[tuple[int, int, Sequence[str]]]) -> list[HostState]:
        """Return states of (elements, quantum, names) each, and rooms for the longest of their pieces."""
        made = [HostState(self.where, *size) for size in sizes]
        longest = max((min(states.size, states.piece) for states in made), default=0)
        arrays = max((len(states) for states in made), default=0) + self.masters
        self.rooms = [GpuRoom(self.where, longest, arrays) for _ in range(ROOMS)]
        self.where.synchronize()  # the rooms are memory that the stream of computing may have used
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of the rooms, all on the GPU."""
        return int(sum(array.nbytes for room in self.rooms for array in room.arrays))

    def through(self, states: HostState, *more: Array) -> Iterator[tuple[slice, list[Array]]]:
        """Yield (part, states and more) on the GPU, piece by piece; `more`: host arrays, as long as a state.

        GPU work launched before the next chunk is requested may change them; they are copied back.
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
        """Return when all pieces are back: reads of states wait by themselves, reads of parameters do not."""
        self._down.synchronize()

    def _copy(self, targets: list[Array], sources: list[Array], kind: int, stream: Any) -> None:
        """Copy arrays by address: `ndarray.set` and `get` look for the right stream and may wait."""
        for target, source in zip(targets, sources, strict=True):
            self._cuda.runtime.memcpyAsync(address(target), address(source), source.nbytes, kind, stream.ptr)


def make_offload(name: str) -> Offload | None:
    """Return what `--offload` asks for; raise UsageError for an unknown name, or without a GPU to spare."""
    if name not in CHOICES:
        raise UsageError(f"--offload {name}: expected one of {', '.join(CHOICES)}")
    return None if name == NONE else Offload(gpu_to_spare(name), masters=name == STATE)
