"""The GPU that a rank uses, with CuPy arrays. CuPy is only imported to look for GPUs and to use one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError, first_line, import_optional

COMPLETE, NOT_READY = 0, 600  # cudaSuccess, cudaErrorNotReady


class CudaMark:
    """Event in the order of the GPU's work: `done` polls it; `wait` blocks without using a core."""

    def __init__(self, event: Any, gpu: Cuda) -> None:
        self.event, self._gpu = event, gpu

    @property
    def done(self) -> bool:
        """Return whether all work before the mark is complete. Raise CuPy's error if the GPU has failed."""
        self._gpu.choose()
        runtime = self._gpu.cupy.cuda.runtime
        status = runtime.eventQuery(self.event.ptr)  # after a fault, CuPy's `Event.done` is False forever
        if status not in (COMPLETE, NOT_READY):
            raise runtime.CUDARuntimeError(status)
        return bool(status == COMPLETE)

    def wait(self) -> None:
        self.event.synchronize()


class Cuda:
    """A GPU as a device: CuPy arrays, and one stream for the computation of all threads.

    Memory comes from CuPy's pool, which uses cudaMalloc, so that MPI libraries and other processes can open
    it. Raises UsageError if there is no such GPU.
    """

    name = "cuda"
    chunk = 0  # CuPy divides its own chunks into blocks
    activations: Any = None  # see `Host.activations`

    def __init__(self, number: int) -> None:
        self.cupy = import_cupy()
        self.number = number
        self._threads = threading.local()
        self.choose()
        self.stream, self._copy_stream = (self.cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        self._fetch_mark: CudaMark | None = None
        self.stream.__enter__()  # never exited: the end of any `with` would reset a stream that `use` had set

    @property
    def about(self) -> str:
        name = self.cupy.cuda.runtime.getDeviceProperties(self.number)["name"].decode()
        return f"{name}, CuPy {self.cupy.__version__}"

    def choose(self) -> None:
        """Make this GPU the current device of the calling thread; a new thread begins with the first GPU."""
        if not getattr(self._threads, "chosen", False):
            self.cupy.cuda.Device(self.number).use()
            self._threads.chosen = True

    def empty(self, size: int | tuple[int, ...], dtype: Any = np.float32) -> Array:
        """Return an uninitialised array, flat or of a shape; CuPy aligns to 512 bytes."""
        return self.cupy.empty(size, dtype)

    small = empty  # small arrays come from CuPy's pool as well

    def lasting(self, nbytes: int) -> Array:
        return self.empty(nbytes, np.uint8)

    def zeros(self, size: int, dtype: Any = np.float32) -> Array:
        return self.cupy.zeros(size, dtype)

    def lend(self, memory: Array, shape: tuple[int, ...], dtype: Any) -> tuple[Any, Array]:
        """Return (owner, array) like `Host.lend`. The array is its own owner: all CuPy views refer to it."""
        array = self.cupy.ndarray(shape, dtype, memory.data)
        return array, array

    def from_host(self, x: Array) -> Array:
        """Return a copy of a host array on the GPU, made in the order of the stream; a GPU array itself."""
        return x if isinstance(x, self.cupy.ndarray) else self.cupy.asarray(x)

    def to_host(self, x: Array) -> Array:
        """Return a copy of a GPU array on the host, after waiting for it; a host array itself."""
        return x.get(stream=self.stream) if isinstance(x, self.cupy.ndarray) else x

    def copy(self, target: Array, source: Array) -> None:
        """Copy `source` to `target`, on any devices. A copy to or from the host is complete on return."""
        to_gpu, from_gpu = (isinstance(x, self.cupy.ndarray) for x in (target, source))
        if to_gpu and not from_gpu:
            target.set(np.ascontiguousarray(source, target.dtype).reshape(target.shape), stream=self.stream)
            self.stream.synchronize()  # because the caller may then change the source
        else:
            target[...] = source if to_gpu else self.to_host(source)

    def pinned(self, nbytes: int) -> Array:
        """Return pinned host memory, which the GPU copies itself. Raise UsageError if this fails."""
        cuda = self.cupy.cuda
        self.choose()
        try:
            memory = cuda.PinnedMemory(max(1, nbytes))  # CuPy's pool would round up to a power of two
        except cuda.runtime.CUDARuntimeError as error:
            raise UsageError(
                f"the host cannot provide {nbytes / 2**30:.1f} GiB of pinned memory ({first_line(error)}); "
                "use more ranks, no --offload, or no --async-save"
            ) from error
        return np.ndarray((nbytes,), np.uint8, cuda.PinnedMemoryPointer(memory, 0))

    def fetch(self, pairs: list[tuple[Array, Array]]) -> CudaMark:
        """Start copies of (pinned, array) pairs to the host; return a mark after the last copy.

        Later work runs concurrently with the copies. Call `before_update` before the arrays change.
        """
        runtime = self.cupy.cuda.runtime
        self._copy_stream.wait_event(self.mark().event)
        for target, source in pairs:
            if isinstance(source, self.cupy.ndarray):
                places = target.ctypes.data, source.data.ptr, source.nbytes
                runtime.memcpyAsync(*places, runtime.memcpyDeviceToHost, self._copy_stream.ptr)
            else:
                target[...] = source
        self._fetch_mark = self.mark(self._copy_stream)
        return self._fetch_mark

    def before_update(self) -> None:
        """Make later computation wait for the copies of `fetch`."""
        if self._fetch_mark is not None:
            self.wait_for(self._fetch_mark)
            self._fetch_mark = None

    def record(self, work: Callable[[], Any]) -> tuple[Any, Any, Any]:
        """Record `work` as a CUDA graph without running it; return the graph, the result, and the pool."""
        pool = self.cupy.cuda.MemoryPool()
        with self.cupy.cuda.using_allocator(pool.malloc):
            self.stream.begin_capture()
            try:
                result = work()
            finally:
                graph = self.stream.end_capture()
        return graph, result, pool

    def mark(self, stream: Any = None) -> CudaMark:
        """Return a mark after all work launched so far on the computing stream, or on another stream."""
        self.choose()
        event = self.cupy.cuda.Event(block=True, disable_timing=True)
        event.record(stream or self.stream)
        return CudaMark(event, self)

    def wait_for(self, mark: Any) -> None:
        """Make later computation wait for a mark, which may be of another stream."""
        self.stream.wait_event(mark.event)

    def synchronize(self) -> None:
        self.stream.synchronize()

    def memory_in_use(self) -> int:
        """Return the bytes of GPU memory that this and other processes use."""
        free, total = self.cupy.cuda.runtime.memGetInfo()
        return int(total - free)

    def stopwatch(self) -> CudaStopwatch:
        return CudaStopwatch(self.cupy.cuda, self.stream)


class CudaStopwatch:
    """Clock of the computing stream. A stamp is an event, whose time is read after the work.

    Two events with known host times, the first event and an event at the time of reading, relate the GPU's
    clock to the host's; between them, both clocks are assumed to run evenly. CUDA returns times in float32:
    ten seconds after the first event they are exact to a microsecond, an hour after it to a quarter of a
    millisecond. The order of times is always right.
    """

    def __init__(self, cuda: Any, stream: Any) -> None:
        self._cuda, self._stream = cuda, stream
        self._first_event, self._first_time = self._event_and_time()
        self._rate = 0.0  # host seconds per GPU millisecond; 0: not known yet

    def stamp(self) -> Any:
        event = self._cuda.Event()
        event.record(self._stream)
        return event

    def _event_and_time(self) -> tuple[Any, float]:
        """Return an event, and the host time at which the GPU reached it."""
        self._stream.synchronize()
        before = time.perf_counter()
        event = self.stamp()
        event.synchronize()
        return event, (before + time.perf_counter()) / 2

    def seconds(self, stamp: Any) -> float:
        """Return the `time.perf_counter` at which the GPU reached a stamp; a float is returned unchanged."""
        if isinstance(stamp, float):
            return stamp
        if not self._rate:
            last, ended = self._event_and_time()
            self._rate = (ended - self._first_time) / self._cuda.get_elapsed_time(self._first_event, last)
        return float(self._first_time + self._cuda.get_elapsed_time(self._first_event, stamp) * self._rate)


def import_cupy() -> Any:
    hint = " or 'zero-mpi[cuda13]', whichever the driver supports"
    return import_optional("--device cuda", "cuda12", "cupy", otherwise=hint)


@contextmanager
def libraries(other: type[Exception] = OSError) -> Iterator[None]:
    """Turn errors of CuPy, nvmath and cuda-pathfinder about missing CUDA libraries into UsageError."""
    try:
        yield
    except (OSError, RuntimeError, other) as error:
        cuda = int(import_cupy().cuda.runtime.runtimeGetVersion()) // 1000
        remedy = f"pip install 'cupy-cuda{cuda}x[ctk]' 'nvmath-python[cu{cuda}]', or load the site's module"
        problem = f"a library of CUDA {cuda} cannot be used ({first_line(error)})"
        raise UsageError(f"--device cuda: {problem}: {remedy}") from error


def gpus() -> int:
    """Return the number of GPUs that CuPy finds; 0 without CuPy or a driver."""
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # ImportError, or CUDARuntimeError, which only CuPy defines
        return 0


def why_no_gpu() -> str:
    """Return a line that says why CuPy finds no GPU. Raise UsageError if CuPy is not installed."""
    cupy = import_cupy()
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no usable GPU: {first_line(error)}; see zero-mpi doctor"
    return "CuPy finds no GPU; see zero-mpi doctor"
