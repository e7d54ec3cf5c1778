"""Transfers of device memory: streams, and exchanges of chunks that travel together, several at once.

`comm` works out once, as a list of exchanges, which data travel where. A backend decides how they travel:
straight from device memory, by way of pinned memory, or by NCCL. A backend runs each exchange as a
generator of its own, and `overlapped` runs these side by side: while one is copied, another is in the MPI
library.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from zero_mpi.comm.start_mpi import MPI as MPI
from zero_mpi.comm.transfer import Needed, Running, has_come
from zero_mpi.device import Cuda, CudaMark
from zero_mpi.device.arrays import address
from zero_mpi.device.ordered_sum import ordered_sum_on_gpu
from zero_mpi.device.types import Array


class GpuStreams:
    """The side streams of the GPU in use: the one place where communication meets the work of a GPU.

    A rank computes on one stream. Copies and sums of transfers go to a stream beside it, `stream`, and copies
    of the staged transport to the host go to a third one, so that both copy engines are at work. A transfer
    begins when all work asked of the computing stream before is done (`begin`): the work that made the data
    to send, and work that still reads memory to be overwritten. At its end the computing stream waits for the
    side stream (`join`), on the GPU and not on the host, so the host goes on to launch what comes next.

    MPI and CUDA keep a device per thread; any thread may push a transfer, so each adopts the GPU first.
    Transports ask no more of an array than `size`, `dtype`, `itemsize`, `nbytes`, slices `[start:stop]`,
    `view(uint8)` and `__cuda_array_interface__` (or DLPack), by which mpi4py finds its memory.
    """

    def __init__(self, gpu: Cuda) -> None:
        self.gpu, self._runtime = gpu, gpu.cupy.cuda.runtime
        self.adopt()
        self.stream = gpu.cupy.cuda.Stream(non_blocking=True)
        self._down = gpu.cupy.cuda.Stream(non_blocking=True)  # to the host

    def adopt(self) -> None:
        """Make this thread use the GPU; called once a thread, whose current stream stays what it is."""
        self.gpu.choose()

    # ------------------------------------------------------------------------- order of streams

    def begin(self) -> CudaMark:
        """Return a mark behind what was computed so far."""
        return self.gpu.mark()

    def follow(self, mark: CudaMark) -> None:
        """Order later work of the streams after a mark, without blocking any thread."""
        self.stream.wait_event(mark.event)

    def mark(self) -> CudaMark:
        """Return a mark behind all work that the side stream was asked for so far."""
        return self.gpu.mark(self.stream)

    def fetched(self) -> CudaMark:
        """Return a mark behind the copies that are on their way to the host."""
        return self.gpu.mark(self._down)

    def join(self, mark: CudaMark) -> None:
        """Order later computing after a mark of these streams."""
        self.gpu.wait_for(mark)

    # -------------------------------------------------------------------------- memory and work

    def empty(self, size: int, dtype: Any) -> Array:
        """Return a flat array of the device, kept forever."""
        self.adopt()
        with self.gpu.stream:  # its memory may still be in use by earlier computing
            array = self.gpu.empty(size, dtype)
        self.follow(self.begin())
        return array

    def copy(self, target: Array, source: Array) -> None:
        """Copy: target[...] = source, both on the device."""
        self._move(target, source, self._runtime.memcpyDeviceToDevice, self.stream)

    def fetch(self, target: Array, source: Array) -> None:
        """Copy from the device into pinned memory of the same size."""
        self._move(target, source, self._runtime.memcpyDeviceToHost, self._down)

    def bring(self, target: Array, source: Array) -> None:
        """Copy from pinned memory to the device."""
        self._move(target, source, self._runtime.memcpyHostToDevice, self.stream)

    def _move(self, target: Array, source: Array, kind: int, stream: Any) -> None:
        places = address(target), address(source)
        if target.nbytes and places[0] != places[1]:
            self.adopt()
            self._runtime.memcpyAsync(*places, target.nbytes, kind, stream.ptr)

    def add(self, out: Array, parts: list[Array], accumulate: bool) -> None:
        """Sum `parts` into `out` as `device.ordered_sum` does, by a kernel."""
        self.adopt()
        ordered_sum_on_gpu(out, parts, accumulate, self.stream)


@dataclass(frozen=True)
class Exchange:
    """Chunks to send (`sends`, with ranks) and buffers that ranks fill (`receives`, with ranks).

    `then` launches the work on the buffers once they are filled.
    """

    sends: Sequence[tuple[Array, Sequence[int]]] = ()
    receives: Sequence[tuple[Array, int]] = ()
    then: Callable[[], None] | None = None


def as_message(chunk: Array) -> list[Any]:
    """Return a chunk, which is not empty, as a message of bytes: mpi4py knows no bfloat16."""
    return [chunk.view(np.uint8), MPI.BYTE]


def passed(mark: Any) -> Callable[[], bool]:
    """Return a function that tells whether the device has come to a mark."""
    return lambda: bool(mark.done)


def arrived(adopt: Callable[[], None], requests: list[Any]) -> Callable[[], bool]:
    """Return a function that tells whether requests are complete; MPI may copy device memory in it."""

    def are_complete() -> bool:
        adopt()
        return bool(MPI.Request.Testall(requests))

    return are_complete


class RunningExchange:
    """A generator in progress, and what it needs next. The generator begins at once."""

    def __init__(self, running: Running) -> None:
        self._running, self.done = running, False
        self._needed: Needed = []
        self.push()

    def ready(self) -> bool:
        """Return whether the generator can go on."""
        return has_come(self._needed)

    def push(self) -> None:
        """Advance the generator as far as it can go."""
        try:
            while not self.done and self.ready():
                self._needed = next(self._running)
        except StopIteration:
            self.done = True


def overlapped(runs: Iterable[Running], depth: int) -> Running:
    """Run generators, up to `depth` at once; one begins when the one `depth` before it has ended."""
    waiting = iter(runs)
    under_way = deque(map(RunningExchange, islice(waiting, depth)))
    while under_way:
        # push() asks MPI here, and not in the condition, so that an error is attributed to this transfer.
        for step in under_way:
            step.push()
        if under_way[0].done:
            under_way.popleft()
            under_way.extend(map(RunningExchange, islice(waiting, 1)))
        else:
            yield partial(any_ready, [step for step in under_way if not step.done])


def any_ready(steps: Sequence[RunningExchange]) -> bool:
    """Return whether one of the steps can go on."""
    return any(step.ready() for step in steps)


class Tickets:
    """Queue of transfers: they begin in the order in which they were started, at most `most` at once.

    There are as many buffers, some pinned. All ranks start transfers in one order, so the oldest one not
    complete everywhere is in progress on every rank that has started it: none waits forever for its turn.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: list[int] = []
        self._next = 0

    def take(self) -> int:
        """Return the number of a new transfer."""
        number, self._next = self._next, self._next + 1
        self._waiting.append(number)
        return number

    def has_come(self, number: int) -> bool:
        """Return whether a transfer may begin."""
        return number in self._waiting[: self._most]

    def end(self, number: int) -> None:
        """Note that a transfer is over."""
        self._waiting.remove(number)
