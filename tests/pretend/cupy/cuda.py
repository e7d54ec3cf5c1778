"""Streams, events and memory of the simulated device. A stream is a thread that runs its work in order."""

from __future__ import annotations

import ctypes
import os
import queue
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

ALIGNMENT = 512
_local = threading.local()


def delay() -> float:
    return float(os.environ.get("PRETEND_CUPY_DELAY", "0"))


LIVE: dict[int, int] = {}  # size of each allocation by its address
_known: dict[int, int] = {}  # address -> start of its allocation, from an earlier search


def inside(ptr: int, size: int) -> bool:
    """Return whether a byte range is inside one allocation. For the simulated libraries; not in CuPy."""
    start = _known.get(ptr, -1)
    if not start <= ptr < start + LIVE.get(start, 0):
        start = next((at for at, length in LIVE.copy().items() if at <= ptr < at + length), -1)
        _known[ptr] = start
    return start >= 0 and ptr + size <= start + LIVE.get(start, 0)


class Memory:
    """Simulated device memory. As in CuPy, freed memory is not reused before its stream has finished."""

    def __init__(self, size: int) -> None:
        self._room = np.empty(max(1, size) + ALIGNMENT, np.uint8)
        self._room.view(np.uint8).fill(0xCB)  # garbage, so that code cannot rely on zeros
        first = self._room.ctypes.data
        self.ptr, self.size = first + -first % ALIGNMENT, size
        POOL.allocated(size)
        self._stream = get_current_stream()
        LIVE[self.ptr] = max(1, size)

    def __del__(self) -> None:
        if not hasattr(self, "_stream"):
            return  # allocation failed, so there is nothing to free
        del LIVE[self.ptr]
        POOL.freed(self.size)
        self._stream.keep(self._room)


def is_device_address(ptr: int) -> bool:
    return inside(ptr, 1)


class MemoryPointer:
    """Address in device memory."""

    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset


class Pool:
    """Counter of allocations; as in CuPy's pool, freed memory counts as kept."""

    def __init__(self) -> None:
        self._used = self._kept = 0

    def allocated(self, size: int) -> None:
        self._used += size
        self._kept = max(self._kept, self._used)

    def freed(self, size: int) -> None:
        self._used -= size

    def used_bytes(self) -> int:
        return self._used

    def total_bytes(self) -> int:
        return self._kept


POOL = Pool()


def alloc(size: int) -> MemoryPointer:
    return MemoryPointer(Memory(size), 0)


class MemoryPool:
    """Pool other than the default pool; here both use host memory."""

    malloc = staticmethod(alloc)


@contextmanager
def using_allocator(allocator: Any) -> Iterator[None]:
    yield


class PinnedMemory:
    """Pinned host memory, which the device copies asynchronously; `cudaHostAlloc` of CUDA."""

    def __init__(self, size: int, flags: int = 0) -> None:
        self._room = np.full(max(1, size), 0xCB, np.uint8)
        self.ptr, self.size = self._room.ctypes.data, size

    def __del__(self) -> None:
        Device().synchronize()  # waits like `cudaFreeHost`, since running transfers may use the memory


def PinnedMemoryPointer(mem: PinnedMemory, offset: int) -> Any:
    pointer = (ctypes.c_char * (mem.size - offset)).from_buffer(mem._room, offset)
    pointer.mem, pointer.ptr = mem, mem.ptr + offset
    return pointer


class Event:
    """Event in the work of a stream."""

    _all: ClassVar[weakref.WeakValueDictionary[int, Event]] = weakref.WeakValueDictionary()

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self._passed = threading.Event()
        self._passed.set()
        self._time, self._timed = 0.0, not disable_timing
        self.ptr = id(self)
        self._all[self.ptr] = self

    def record(self, stream: Any = None) -> None:
        passed = self._passed = threading.Event()

        def mark() -> None:
            self._time = time.perf_counter()
            passed.set()

        (stream or get_current_stream()).do(mark)

    @property
    def done(self) -> bool:
        return event_query(self.ptr) == 0  # like CuPy's event, also after a sticky error

    def synchronize(self) -> None:
        self._passed.wait()
        if fault.status:
            raise runtime.CUDARuntimeError(fault.status)


fault = SimpleNamespace(status=0)  # status of all calls; set by tests


def event_query(ptr: int) -> int:
    assert hasattr(_local, "device"), "in CUDA, a thread without a chosen GPU opens the first one"
    return fault.status or (0 if Event._all[ptr]._passed.is_set() else 600)


def get_elapsed_time(start: Event, end: Event) -> float:
    if not (start._timed and end._timed and start.done and end.done):
        raise runtime.CUDARuntimeError(600)  # an event is not ready or has no timing
    return float(np.float32((end._time - start._time) * 1e3))  # with CUDA's resolution


class Stream:
    """Stream that runs its work in order, asynchronously, in its own thread."""

    _all: ClassVar[dict[int, Stream]] = {}

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: Any = None
    ) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._asked, self._finished = 0, 0
        self._kept: deque[tuple[int, Any]] = deque()
        self._changed = threading.Condition()
        self.recorded: list[Callable[[], None]] | None = None
        self.ptr = 0 if null else len(self._all) + 1
        self._all[self.ptr] = self
        self._random = random.Random(self.ptr)
        threading.Thread(target=self._run, name=f"pretend stream {self.ptr}", daemon=True).start()

    def begin_capture(self, mode: int = 2) -> None:
        assert self.recorded is None, "this stream is being captured already"
        self.recorded = []

    def end_capture(self) -> Graph:
        recorded, self.recorded = self.recorded, None
        return Graph(recorded)

    def do(self, work: Callable[[], None]) -> None:
        if self.recorded is not None:
            self.recorded.append(work)
            return
        with self._changed:
            self._asked += 1
        self._work.put(work)

    def keep(self, memory: Any) -> None:
        if self.recorded is not None:  # a recorded graph keeps its memory
            self.recorded.append(partial(id, memory))
        if not self.done:
            self._kept.append((self._asked, memory))

    def _run(self) -> None:
        while True:
            work = self._work.get()
            if longest := delay():
                time.sleep(self._random.random() * longest)
            try:
                work()
            except BaseException as error:  # raised in the next wait
                self._error = error
            del work  # frees its arrays before any waiter wakes up
            self._let_go(self._finished + 1)
            with self._changed:
                self._finished += 1
                self._changed.notify_all()
            self._let_go(self._finished)  # frees memory of work that was queued meanwhile

    def _let_go(self, finished: int) -> None:
        while self._kept and self._kept[0][0] <= finished:
            self._kept.popleft()

    def synchronize(self) -> None:
        if threading.current_thread().name == f"pretend stream {self.ptr}":
            return  # called from work of this stream
        if self.recorded is not None:
            raise CUDARuntimeError(900)  # cudaErrorStreamCaptureUnsupported
        with self._changed:
            target = self._asked
            self._changed.wait_for(lambda: self._finished >= target)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    @property
    def done(self) -> bool:
        return self._finished >= self._asked

    def wait_event(self, event: Event) -> None:
        passed = event._passed
        self.do(lambda: passed.wait() and None)

    def use(self) -> Stream:
        _local.stream = self
        return self

    def __enter__(self) -> Stream:
        _local.stack = [*getattr(_local, "stack", []), self]
        return self.use()

    def __exit__(self, *_: Any) -> None:
        _local.stack.pop()
        (_local.stack or [Stream.null])[-1].use()


class Graph:
    """Work that was captured from a stream; `launch` submits it again."""

    def __init__(self, recorded: list[Callable[[], None]]) -> None:
        self.recorded = recorded

    def launch(self, stream: Stream) -> None:
        stream.do(lambda: [work() for work in self.recorded] and None)


Stream.null = Stream(null=True)


def get_current_stream() -> Stream:
    return getattr(_local, "stream", Stream.null)


class CUDARuntimeError(RuntimeError):
    """Error of the simulated CUDA runtime."""


def gpus() -> int:
    count = int(os.environ.get("PRETEND_CUPY_GPUS", "1"))
    if not count:
        raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
    return count


class Device:
    """One of the simulated GPUs."""

    def __init__(self, device: int | None = None) -> None:
        self.id = getattr(_local, "device", 0) if device is None else int(device)

    def use(self) -> None:
        if self.id >= gpus():
            raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        _local.device = self.id

    def synchronize(self) -> None:
        for stream in list(Stream._all.values()):
            stream.synchronize()

    compute_capability = "90"
    mem_info = (64 << 30, 80 << 30)


def memcpy_async(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    Stream._all[stream].do(lambda: ctypes.memmove(dst, src, size) and None)


runtime = SimpleNamespace(
    getDeviceCount=gpus,
    CUDARuntimeError=CUDARuntimeError,
    memcpyAsync=memcpy_async,
    eventQuery=event_query,
    free=lambda ptr: None,
    memcpyHostToDevice=1,
    memcpyDeviceToHost=2,
    memcpyDeviceToDevice=3,
    memcpyDefault=4,
    runtimeGetVersion=lambda: 13000,
    driverGetVersion=lambda: 13000,
    getDeviceProperties=lambda number: {
        "name": b"pretend GPU",
        "multiProcessorCount": 4,
        "totalGlobalMem": 80 << 30,
    },
    deviceSynchronize=lambda: Device().synchronize(),
    memGetInfo=lambda: Device.mem_info,
    deviceGetAttribute=lambda attribute, device: {20: compute_mode}[attribute],
)


compute_mode = 0  # set by tests; 3: only one process may use the GPU


def __getattr__(name: str) -> Any:
    if name == "nccl":  # a submodule in the real package, here a separate module
        from . import nccl

        return nccl
    raise AttributeError(f"the simulated CuPy has no cuda.{name}; see tests/pretend/cupy")
