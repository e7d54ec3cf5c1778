"""CuPy arrays on the one GPU that a rank uses. CuPy is imported when a GPU is chosen."""

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
    """Marker in the order of the GPU's work: `done` tests whether it is reached, `wait` sleeps until then."""

    def __init__(self, event: Any, gpu: Cuda) -> None:
        self.event, self._gpu = event, gpu

    @property
    def done(self) -> bool:
        """True if all work before the marker is complete. Raises CuPy's error if the GPU has failed."""
        self._gpu.choose()
        runtime = self._gpu.cupy.cuda.runtime
        status = runtime.eventQuery(self.event.ptr)  # CuPy's `Event.done` says no forever after a fault
        if status not in (COMPLETE, NOT_READY):
            raise runtime.CUDARuntimeError(status)
        return bool(status == COMPLETE)

    def wait(self) -> None:
        self.event.synchronize()


class Cuda:
    """CuPy arrays on one GPU. All threads of the process compute on one stream.

    CuPy's pool allocates memory by cudaMalloc, so MPI libraries and other processes can map it. The
    constructor raises UsageError if CuPy is not installed.
    """

    name = "cuda"
    chunk = 0  # CuPy's pool already combines small allocations
    activations: Any = None  # as `Host.activations`

    def __init__(self, number: int) -> None:
        self.cupy = import_cupy()
        self.number = number
        self._threads = threading.local()
        self.choose()
        self.stream, self._copies = (self.cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        self._fetched: CudaMark | None = None
        self.stream.__enter__()  # never left: CuPy forgets a stream chosen by `use` after the next `with`

    @property
    def about(self) -> str:
        """A description of the GPU, for messages."""
        name = self.cupy.cuda.runtime.getDeviceProperties(self.number)["name"].decode()
        return f"{name}, CuPy {self.cupy.__version__}"

    def choose(self) -> None:
        """Let the calling thread use this GPU; otherwise a new thread would use the first GPU."""
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
        """Return (owner, array) like `Host.lend`: all views of a CuPy array keep a reference to the array."""
        array = self.cupy.ndarray(shape, dtype, memory.data)
        return array, array

    def from_host(self, x: Array) -> Array:
        """Return a copy of a host array on the GPU; later work on the GPU sees the copy."""
        return x if isinstance(x, self.cupy.ndarray) else self.cupy.asarray(x)

    def to_host(self, x: Array) -> Array:
        """Return a copy of a GPU array on the host, when the copy is complete."""
        return x.get(stream=self.stream) if isinstance(x, self.cupy.ndarray) else x

    def copy(self, target: Array, source: Array) -> None:
        """Set target[...] = source on any devices; return when a copy to or from the host is complete."""
        here, there = (isinstance(x, self.cupy.ndarray) for x in (target, source))
        if here and not there:
            target.set(np.ascontiguousarray(source, target.dtype).reshape(target.shape), stream=self.stream)
            self.stream.synchronize()  # the source may be changed as soon as this returns
        else:
            target[...] = source if here else self.to_host(source)

    def pinned(self, nbytes: int) -> Array:
        """Return host memory that the GPU can access directly; raise UsageError if there is not enough."""
        cuda = self.cupy.cuda
        self.choose()
        try:
            memory = cuda.PinnedMemory(max(1, nbytes))  # CuPy's pool would take the next power of two
        except cuda.runtime.CUDARuntimeError as error:
            raise UsageError(
                f"the host cannot provide {nbytes / 2**30:.1f} GiB of pinned memory ({first_line(error)}); "
                "use more ranks, no --offload, or no --async-save"
            ) from error
        return np.ndarray((nbytes,), np.uint8, cuda.PinnedMemoryPointer(memory, 0))

    def fetch(self, pairs: list[tuple[Array, Array]]) -> CudaMark:
        """Copy arrays, given as (pinned, array), while later work runs; return a marker after the last copy.

        Call `before_update` before the arrays change.
        """
        runtime = self.cupy.cuda.runtime
        self._copies.wait_event(self.mark().event)
        for target, source in pairs:
            if isinstance(source, self.cupy.ndarray):
                places = target.ctypes.data, source.data.ptr, source.nbytes
                runtime.memcpyAsync(*places, runtime.memcpyDeviceToHost, self._copies.ptr)
            else:
                target[...] = source
        self._fetched = self.mark(self._copies)
        return self._fetched

    def before_update(self) -> None:
        """Order later computation after the copies of `fetch`."""
        if self._fetched is not None:
            self.wait_for(self._fetched)
            self._fetched = None

    def record(self, work: Callable[[], Any]) -> tuple[Any, Any, Any]:
        """Record `work` without running it; return the graph, the result, and the memory of both."""
        pool = self.cupy.cuda.MemoryPool()
        with self.cupy.cuda.using_allocator(pool.malloc):
            self.stream.begin_capture()
            try:
                result = work()
            finally:
                graph = self.stream.end_capture()
        return graph, result, pool

    def mark(self, stream: Any = None) -> CudaMark:
        """Return a marker after all work launched so far on a stream, by default the compute stream."""
        self.choose()
        event = self.cupy.cuda.Event(block=True, disable_timing=True)
        event.record(stream or self.stream)
        return CudaMark(event, self)

    def wait_for(self, mark: Any) -> None:
        """Order later computation after a marker, which may be on another stream."""
        self.stream.wait_event(mark.event)

    def synchronize(self) -> None:
        self.stream.synchronize()

    def memory_in_use(self) -> int:
        """Return the bytes of GPU memory that are in use by all processes."""
        free, total = self.cupy.cuda.runtime.memGetInfo()
        return int(total - free)

    def stopwatch(self) -> CudaStopwatch:
        return CudaStopwatch(self.cupy.cuda, self.stream)


class CudaStopwatch:
    """Clock of the compute stream. Stamps are events, whose times are read when all work is complete.

    Two events whose times on the host's clock are known relate the two clocks: the first event, and one made
    when times are read. Between them, both clocks are assumed to run evenly. CUDA returns times in float32.
    They are exact to a microsecond ten seconds after the first event, and to a quarter of a millisecond after
    an hour. Times never decrease along the stream.
    """

    def __init__(self, cuda: Any, stream: Any) -> None:
        self._cuda, self._stream = cuda, stream
        self._first, self._begun = self._known()
        self._rate = 0.0  # host seconds per GPU millisecond; 0: not measured yet

    def stamp(self) -> Any:
        """Return an event after all work launched so far."""
        event = self._cuda.Event()
        event.record(self._stream)
        return event

    def _known(self) -> tuple[Any, float]:
        """Return an event, and the host time at which the GPU reached it."""
        self._stream.synchronize()
        before = time.perf_counter()
        event = self.stamp()
        event.synchronize()
        return event, (before + time.perf_counter()) / 2

    def seconds(self, stamp: Any) -> float:
        """Return the host time (`time.perf_counter`) at which the GPU reached a stamp (a float: itself)."""
        if isinstance(stamp, float):
            return stamp
        if not self._rate:
            last, ended = self._known()
            self._rate = (ended - self._begun) / self._cuda.get_elapsed_time(self._first, last)
        return float(self._begun + self._cuda.get_elapsed_time(self._first, stamp) * self._rate)


def import_cupy() -> Any:
    """Return CuPy; raise UsageError if it is not installed."""
    others = " or 'zero-mpi[cuda13]', whichever the driver supports"
    return import_optional("--device cuda", "cuda12", "cupy", otherwise=others)


@contextmanager
def libraries(other: type[Exception] = OSError) -> Iterator[None]:
    """Turn the errors of CuPy, nvmath and cuda-pathfinder for a missing CUDA library into UsageError."""
    try:
        yield
    except (OSError, RuntimeError, other) as error:
        cuda = int(import_cupy().cuda.runtime.runtimeGetVersion()) // 1000
        remedy = f"pip install 'cupy-cuda{cuda}x[ctk]' 'nvmath-python[cu{cuda}]', or load the site's module"
        what = f"a library of CUDA {cuda} cannot be used ({first_line(error)})"
        raise UsageError(f"--device cuda: {what}: {remedy}") from error


def gpus() -> int:
    """Return the number of GPUs that CuPy finds; 0 without CuPy or a driver."""
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # no CuPy, or CUDARuntimeError, which only CuPy defines
        return 0


def why_no_gpu() -> str:
    """Return the reason why CuPy finds no GPU; raise UsageError if CuPy is not installed."""
    cupy = import_cupy()
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no usable GPU: {first_line(error)}; see zero-mpi doctor"
    return "CuPy finds no GPU; see zero-mpi doctor"
