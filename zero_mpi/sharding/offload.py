"""State that lies in the host's memory and passes through the GPU in pieces when it is updated.

AdamW reads and writes both moments once a step, and nobody needs them in between; on the GPU they would only
take room, 8 bytes a parameter, and so does the float32 copy of the parameters (4 bytes) where what layers
read is of low precision. Here they lie in pinned memory. A piece comes on one stream, is updated on the one
that computes and goes back on a third; events put the three in order, so that the next piece comes while this
one is updated and the last one goes. The update of each element is the same as without: so are its bits.
(ZeRO-Offload, Ren et al., 2021, leaves the update to the host as well; a GPU's link has become too fast for
that to pay.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from zero_mpi import device
from zero_mpi.device import Cuda
from zero_mpi.device.arrays import address
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError
from zero_mpi.sharding.precision import Precision

NONE, MOMENTS, STATE = CHOICES = ("none", "moments", "state")
PIECE_ELEMENTS = 4 << 20  # elements of each moment that pass at once: 32 MiB of both
ROOMS = 3  # one that is filled, one that is updated, one that is emptied
OF_MOMENTS, OF_STATE = 2, 3  # arrays that pass through a room
FLOAT = np.dtype(np.float32)


def piece_of(quantum: int) -> int:
    """Elements of a piece: whole runs of decay, so at least one."""
    return max(1, PIECE_ELEMENTS // quantum) * quantum


class HostMoments:
    """Both moments of one unit's part, flat, zeros at first, in pinned memory.

    `quantum`: pieces begin at its multiples. Reading `first` or `second` waits for what is on its way there.
    """

    def __init__(self, where: Cuda, size: int, quantum: int) -> None:
        self.size, self.piece = size, piece_of(quantum)
        self._both = pinned(where, 2 * size)
        self._both.fill(0)
        self.stored = where.cupy.cuda.Event(block=True, disable_timing=True)  # the last piece that went back

    @property
    def first(self) -> Array:
        """The first moment in the host's memory, once all of it is back."""
        self.stored.synchronize()
        return self._both[: self.size]

    @property
    def second(self) -> Array:
        """The second moment in the host's memory, once all of it is back."""
        self.stored.synchronize()
        return self._both[self.size :]

    @property
    def nbytes(self) -> int:
        """Bytes of both moments, all on the host."""
        return int(self._both.nbytes)

    def pieces(self) -> Iterator[tuple[slice, Array, Array]]:
        """(part, first, second), complete or not."""
        for start in range(0, self.size, self.piece):
            stop = min(start + self.piece, self.size)
            yield slice(start, stop), self._both[start:stop], self._both[self.size + start : self.size + stop]


def pinned(where: Cuda, size: int) -> Array:
    """A flat float32 array that the GPU copies from and to by itself; raises UsageError if there is no room.

    Not by `cupyx.empty_pinned`, whose pool takes the next power of two.
    """
    cuda = where.cupy.cuda
    try:
        memory = cuda.PinnedMemory(max(1, size) * FLOAT.itemsize)
    except cuda.runtime.CUDARuntimeError as error:
        raise UsageError(
            f"--offload: the host gives no {size * FLOAT.itemsize / 2**30:.1f} GiB of pinned memory "
            f"({str(error).splitlines()[0]}); use more ranks, or leave --offload out"
        ) from error
    return np.ndarray((size,), FLOAT, cuda.PinnedMemoryPointer(memory, 0))


class GpuRoom:
    """A place on the GPU for a piece of each array, and the events of those who use it in turn."""

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

    def moments(self, sizes: Iterable[tuple[int, int]]) -> list[HostMoments]:
        """Moments of (elements, quantum) each, and rooms for the longest of their pieces."""
        made = [HostMoments(self.where, size, quantum) for size, quantum in sizes]
        longest = max((min(moments.size, moments.piece) for moments in made), default=0)
        arrays = OF_STATE if self.masters else OF_MOMENTS
        self.rooms = [GpuRoom(self.where, longest, arrays) for _ in range(ROOMS)]
        self.where.synchronize()  # the rooms are memory that the stream of computing may have used
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of the rooms, all on the GPU."""
        return int(sum(array.nbytes for room in self.rooms for array in room.arrays))

    def through(self, moments: HostMoments, *more: Array) -> Iterator[tuple[slice, *tuple[Array, ...]]]:
        """(part, first, second, ...) on the GPU, piece by piece; `more`: of the host, as long as a moment.

        What the GPU is asked to compute before the next piece is asked for may change them; it goes back.
        """
        self._up.wait_event(moments.stored)  # in the step before
        for part, *of_moments in moments.pieces():
            there = [*of_moments, *(array[part] for array in more)]
            room, self._turn = self.rooms[self._turn], (self._turn + 1) % ROOMS
            here = [array[: part.stop - part.start] for array in room.arrays[: len(there)]]
            self._up.wait_event(room.emptied)
            self._copy(here, there, self._cuda.runtime.memcpyHostToDevice, self._up)
            room.filled.record(self._up)
            self.where.stream.wait_event(room.filled)
            yield part, *here
            room.updated.record(self.where.stream)
            self._down.wait_event(room.updated)
            self._copy(there, here, self._cuda.runtime.memcpyDeviceToHost, self._down)
            room.emptied.record(self._down)
        moments.stored.record(self._down)

    def finish(self) -> None:
        """Return when all that passed is back: moments look for themselves, parameters anybody may read."""
        self._down.synchronize()

    def _copy(self, targets: list[Array], sources: list[Array], kind: int, stream: Any) -> None:
        """Copy arrays by address: `ndarray.set` and `get` look for the right stream and may wait."""
        for target, source in zip(targets, sources, strict=True):
            self._cuda.runtime.memcpyAsync(address(target), address(source), source.nbytes, kind, stream.ptr)


def make_offload(name: str) -> Offload | None:
    """What `--offload` asks for; raises UsageError for an unknown name and where there is no GPU to spare."""
    if name not in CHOICES:
        raise UsageError(f"--offload {name}: expected one of {', '.join(CHOICES)}")
    return None if name == NONE else Offload(gpu_to_spare(name), masters=name == STATE)


def gpu_to_spare(name: str) -> Cuda:
    """The GPU in use; raises UsageError where there is none."""
    where = device.in_use()
    if not isinstance(where, Cuda):
        raise UsageError(
            f"--offload {name}: expected a GPU, whose memory it spares; got the CPU, leave it out"
        )
    return where


def masters_on_host(precision: Precision) -> Callable[[int], Array]:
    """size -> zeros in pinned memory, for parameters in float32.

    Raises UsageError without a GPU, and where layers read the very parameters that are updated.
    """
    where = gpu_to_spare(STATE)
    if not precision.is_low:
        raise UsageError(
            f"--offload {STATE}: with --precision {precision.name} the parameters are what layers read; use "
            f"--offload {MOMENTS}, or bf16"
        )

    def zeros(size: int) -> Array:
        array = pinned(where, size)
        array.fill(0)
        return array

    return zeros
