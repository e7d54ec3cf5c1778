"""Transfers of device memory: streams, and exchanges, which are chunks that are sent together.

`comm` describes the chunks to send, and their targets, as `Exchange`s. A backend decides how to send them:
directly from device memory, through pinned memory, or by NCCL. MPI backends run each exchange as a separate
generator. `overlap` runs these generators concurrently: while one copies, another sends by MPI.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
    """The side streams of the GPU in use. Only this class orders communication and computation on the GPU.

    A rank computes on one stream. Copies and sums of transfers use a side stream, `stream`, and the staged
    transport's copies to the host use a third stream, so that both copy engines work. A transfer begins when
    all earlier work of the computing stream is done (`begin`): work that produces the data to send, and work
    that still reads memory to be overwritten. At the end of a transfer the computing stream waits for the
    side stream (`join`), on the GPU and not on the host, so the host can launch further work.

    MPI and CUDA have a current device per thread, and any thread may advance a transfer. So each thread first
    calls `adopt`. Transports use only `size`, `dtype`, `itemsize`, `nbytes`, slices `[start:stop]`,
    `reshape(-1)` and `view(uint8)` of an array, and its `__cuda_array_interface__` (or DLPack), for mpi4py.
    """

    def __init__(self, gpu: Cuda) -> None:
        self.gpu, self._runtime = gpu, gpu.cupy.cuda.runtime
        self.adopt()
        self.stream = gpu.cupy.cuda.Stream(non_blocking=True)
        self._down = gpu.cupy.cuda.Stream(non_blocking=True)  # for copies to the host

    def adopt(self) -> None:
        """Make the GPU this thread's current device; its current stream does not change."""
        self.gpu.choose()

    # ------------------------------------------------------------------------- order of streams

    def begin(self) -> CudaMark:
        """Return a mark (an event) that completes after all computation launched so far."""
        return self.gpu.mark()

    def follow(self, mark: CudaMark) -> None:
        """Make later work of the side stream wait for a mark, without blocking any thread."""
        self.stream.wait_event(mark.event)

    def mark(self) -> CudaMark:
        """Return a mark that completes after all work launched so far on the side stream."""
        return self.gpu.mark(self.stream)

    def fetched(self) -> CudaMark:
        """Return a mark that completes after all copies to the host that were launched so far."""
        return self.gpu.mark(self._down)

    def join(self, mark: CudaMark) -> None:
        """Make later computation wait for a mark of these streams."""
        self.gpu.wait_for(mark)

    # -------------------------------------------------------------------------- memory and work

    def empty(self, size: int, dtype: Any) -> Array:
        """Return a flat array in device memory, which the caller reuses for later transfers."""
        self.adopt()
        with self.gpu.stream:  # earlier work of this stream may still use the memory
            array = self.gpu.empty(size, dtype)
        self.follow(self.begin())
        return array

    def copy(self, target: Array, source: Array) -> None:
        self._move(target, source, self._runtime.memcpyDeviceToDevice, self.stream)

    def fetch(self, target: Array, source: Array) -> None:
        self._move(target, source, self._runtime.memcpyDeviceToHost, self._down)

    def bring(self, target: Array, source: Array) -> None:
        self._move(target, source, self._runtime.memcpyHostToDevice, self.stream)

    def _move(self, target: Array, source: Array, kind: int, stream: Any) -> None:
        places = address(target), address(source)
        if target.nbytes and places[0] != places[1]:
            self.adopt()
            self._runtime.memcpyAsync(*places, target.nbytes, kind, stream.ptr)

    def add(self, out: Array, parts: list[Array], accumulate: bool) -> None:
        self.adopt()
        ordered_sum_on_gpu(out, parts, accumulate, self.stream)


@dataclass(frozen=True)
class Exchange:
    """Chunks to send (`sends`, with targets) and buffers to fill (`receives`, with the source rank).

    `then` launches work on the buffers when they are filled.
    """

    sends: Sequence[tuple[Array, Sequence[int]]] = ()
    receives: Sequence[tuple[Array, int]] = ()
    then: Callable[[], None] | None = None


def as_message(chunk: Array) -> list[Any]:
    """Return a chunk, which must not be empty, as a message of bytes, since mpi4py lacks bfloat16."""
    return [chunk.view(np.uint8), MPI.BYTE]


def completion(mark: Any) -> Callable[[], bool]:
    return lambda: bool(mark.done)


def arrival(adopt: Callable[[], None], requests: list[Any]) -> Callable[[], bool]:
    """Return a function that tests whether requests are complete; a call may copy device memory."""

    def are_complete() -> bool:
        adopt()
        return bool(MPI.Request.Testall(requests))

    return are_complete


class RunningExchange:
    """A running generator, and the requests or condition that it waits for. It starts immediately."""

    def __init__(self, running: Running) -> None:
        self._running, self.done = running, False
        self._needed: Needed = []
        self.push()

    def ready(self) -> bool:
        return has_come(self._needed)

    def push(self) -> None:
        """Advance the generator until it must wait or ends."""
        try:
            while not self.done and self.ready():
                self._needed = next(self._running)
        except StopIteration:
            self.done = True


def overlap(runs: Iterable[Running], depth: int) -> Running:
    """Run up to `depth` generators at a time; when the oldest ends, the next one begins."""
    queue = iter(runs)
    active = deque(map(RunningExchange, islice(queue, depth)))
    while active:
        # push() tests requests here, not in the condition, so that an error is attributed to this transfer.
        for step in active:
            step.push()
        if active[0].done:
            active.popleft()
            active.extend(map(RunningExchange, islice(queue, 1)))
        else:
            yield lambda: any(step.ready() for step in active if not step.done)


class Tickets:
    """Queue of transfers, which begin in start order, with at most `most` in progress.

    There are buffers for `most` transfers. All ranks start transfers in the same order, so the oldest
    incomplete transfer is in progress on every rank that has started it, and no transfer waits forever.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: list[int] = []
        self._next = 0

    def take(self) -> int:
        number, self._next = self._next, self._next + 1
        self._waiting.append(number)
        return number

    def has_come(self, number: int) -> bool:
        return number in self._waiting[: self._most]

    def end(self, number: int) -> None:
        self._waiting.remove(number)
