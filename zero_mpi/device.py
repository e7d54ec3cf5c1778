"""Where arrays live: in the host's memory, or in that of the one GPU that a rank uses.

A process computes on one device, chosen once, before the first large array. What both kinds offer is the few
things that the arrays above are made of: flat memory, memory lent to an array that tells when it comes back,
copies between the two sides, and marks in the order of the device's work. Everything else is array code that
NumPy and CuPy share. CuPy is imported when a GPU is chosen and not before.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import sys
import threading
import time
from typing import Any

import numpy as np

from zero_mpi.errors import UsageError

Array = Any  # numpy.ndarray or cupy.ndarray: the two share the methods that are used here

ALIGNMENT = 64  # bytes: a cache line, and the width of the widest CPU vector registers
COMPLETE, NOT_READY = 0, 600  # cudaSuccess, cudaErrorNotReady
LOCAL_RANK = (  # what launchers call a rank's number on its node
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PMI_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "SLURM_LOCALID",
)


class Done:
    """A mark in work that was complete when it was made, as on the host."""

    done = True

    def wait(self) -> None:
        """Return when the work before the mark is complete."""


class Host:
    """NumPy arrays in the process's own memory."""

    name = about = "cpu"

    def empty(self, size: int, dtype: Any = np.float32) -> Array:
        """A flat uninitialised array that starts at a cache line.

        The same alignment everywhere keeps vector code on the same path whatever slice a rank holds.
        """
        itemsize = np.dtype(dtype).itemsize
        raw = np.empty(size * itemsize + ALIGNMENT, np.uint8)
        skip = -raw.ctypes.data % ALIGNMENT
        return raw[skip : skip + size * itemsize].view(dtype)

    def zeros(self, size: int, dtype: Any = np.float32) -> Array:
        """A flat array of zeros, aligned as `empty`."""
        array = self.empty(size, dtype)
        array.fill(0)
        return array

    def lend(self, memory: Array, shape: tuple[int, ...], dtype: Any) -> tuple[Any, Array]:
        """(owner, array): an array on flat `memory`, and an object that lives as long as any view of it."""
        owner: Any = (ctypes.c_char * memory.nbytes).from_buffer(memory)
        return owner, np.ndarray(shape, dtype, owner)

    def small(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An uninitialised array too small to be worth more than the library's own allocator."""
        return np.empty(shape, dtype)

    def from_host(self, x: Array) -> Array:
        """`x` itself."""
        return x

    def to_host(self, x: Array) -> Array:
        """`x` itself."""
        return x

    def all_to_host(self, arrays: list[Array]) -> list[Array]:
        """`arrays` themselves."""
        return arrays

    def copy(self, target: Array, source: Array) -> None:
        """target[...] = source."""
        target[...] = source

    def mark(self) -> Any:
        """A mark in the order of work; on the host, work is complete when its call returns."""
        return Done()

    def wait_for(self, mark: Any) -> None:
        """Let what is computed from now on come after a mark."""

    def synchronize(self) -> None:
        """Return when all work is complete."""

    def memory_in_use(self) -> int:
        """Bytes of this process in the host's memory, what it shares with others included."""
        try:
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * mmap.PAGESIZE
        except OSError:  # no Linux: the most so far, which is in KiB there
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def stopwatch(self) -> Stopwatch:
        """When what is computed begins and ends."""
        return Stopwatch()


class Stopwatch:
    """The host's clock: work is done when its call returns, so a stamp is the time."""

    stamp = staticmethod(time.perf_counter)

    def seconds(self, stamp: float) -> float:
        """`stamp` itself, by `time.perf_counter`."""
        return stamp


class _Owner:
    """Lives as long as the memory of a lent array is referred to."""

    __slots__ = ("__weakref__",)


class Mark:
    """An event in the order of the GPU's work; `done` looks, `wait` blocks and leaves the core to others."""

    def __init__(self, event: Any, gpu: Cuda) -> None:
        self.event, self._gpu = event, gpu

    @property
    def done(self) -> bool:
        """Whether all work before the mark is complete. Raises CuPy's error if the GPU has failed."""
        return self._gpu.has_passed(self.event)

    def wait(self) -> None:
        """Return when the work before the mark is complete."""
        self.event.synchronize()


class Cuda:
    """CuPy arrays on one GPU. All computing goes to one stream, whichever thread asks for it.

    Memory comes from CuPy's pool, which takes it by cudaMalloc: MPI libraries and other processes can open
    that. Raises UsageError where there is no such GPU.
    """

    name = "cuda"

    def __init__(self, number: int) -> None:
        self.cupy = import_cupy()
        self.number = number
        self._threads = threading.local()
        self.choose()
        self.stream = self.cupy.cuda.Stream(non_blocking=True)
        self.adopt_thread()

    @property
    def about(self) -> str:
        """What it is, for people."""
        name = self.cupy.cuda.runtime.getDeviceProperties(self.number)["name"].decode()
        return f"{name}, CuPy {self.cupy.__version__}"

    def choose(self) -> None:
        """Let the calling thread use this GPU: one that has chosen none takes the first, and its memory."""
        if not getattr(self._threads, "chosen", False):
            self.cupy.cuda.Device(self.number).use()
            self._threads.chosen = True

    def adopt_thread(self) -> None:
        """Let the calling thread work on this GPU and its stream: CuPy keeps both per thread."""
        self.choose()
        self.stream.use()

    def empty(self, size: int, dtype: Any = np.float32) -> Array:
        """A flat uninitialised array; CuPy aligns to 512 bytes."""
        return self.cupy.empty(size, dtype)

    def zeros(self, size: int, dtype: Any = np.float32) -> Array:
        """A flat array of zeros."""
        return self.cupy.zeros(size, dtype)

    def lend(self, memory: Array, shape: tuple[int, ...], dtype: Any) -> tuple[Any, Array]:
        """As `Host.lend`: arrays and their views hold the memory object, which holds the owner."""
        owner, cuda = _Owner(), self.cupy.cuda
        lent = cuda.UnownedMemory(memory.data.ptr, memory.nbytes, owner, self.number)
        return owner, self.cupy.ndarray(shape, dtype, cuda.MemoryPointer(lent, 0))

    def small(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An uninitialised small array of the pool's."""
        return self.cupy.empty(shape, dtype)

    def from_host(self, x: Array) -> Array:
        """A copy of a host's array on the GPU, in the order of its work."""
        return x if isinstance(x, self.cupy.ndarray) else self.cupy.asarray(x)

    def to_host(self, x: Array) -> Array:
        """A copy of a GPU's array on the host, complete."""
        return x.get(stream=self.stream) if isinstance(x, self.cupy.ndarray) else x

    def all_to_host(self, arrays: list[Array]) -> list[Array]:
        """Copies of vectors on the GPU, complete; one copy of all, since each is waited for."""
        if not arrays:
            return []
        whole, ends = self.to_host(self.cupy.concatenate(arrays)), np.cumsum([x.size for x in arrays])
        return np.split(whole, ends[:-1])

    def copy(self, target: Array, source: Array) -> None:
        """target[...] = source, wherever the two are; what comes to or from the host is complete."""
        here, there = (isinstance(x, self.cupy.ndarray) for x in (target, source))
        if here and not there:
            target.set(np.ascontiguousarray(source, target.dtype).reshape(target.shape), stream=self.stream)
            self.stream.synchronize()  # the source may be changed as soon as this returns
        elif there and not here:
            target[...] = source.get(stream=self.stream)
        else:
            target[...] = source

    def mark(self) -> Mark:
        """A mark behind all work that was asked for so far."""
        event = self.cupy.cuda.Event(block=True, disable_timing=True)
        event.record(self.stream)
        return Mark(event, self)

    def has_passed(self, event: Any) -> bool:
        """Whether the GPU has come to an event. CuPy's `Event.done` says no for ever where it has failed."""
        self.choose()
        runtime = self.cupy.cuda.runtime
        status = runtime.eventQuery(event.ptr)
        if status not in (COMPLETE, NOT_READY):
            raise runtime.CUDARuntimeError(status)
        return bool(status == COMPLETE)

    def wait_for(self, mark: Any) -> None:
        """Let what is computed from now on come after a mark, which may be on another stream."""
        self.stream.wait_event(mark.event)

    def synchronize(self) -> None:
        """Return when all work is complete."""
        self.stream.synchronize()

    def memory_in_use(self) -> int:
        """Bytes of the GPU that are not free, those of other processes on it included."""
        free, total = self.cupy.cuda.runtime.memGetInfo()
        return int(total - free)

    def stopwatch(self) -> CudaStopwatch:
        """When what is computed begins and ends."""
        return CudaStopwatch(self.cupy.cuda, self.stream)


class CudaStopwatch:
    """Events on the stream that computes, whose times are asked for when all is done.

    Two events of which the host's time is known, the first one and one made when times are asked for, tell
    how the GPU's clock lies to the host's; between them it is taken to run evenly. The host's own times,
    which are floats, stay what they are. CUDA tells times in float32: a microsecond in ten seconds since the
    first event, a quarter of a millisecond in an hour, and never one mark before another that it follows.
    """

    def __init__(self, cuda: Any, stream: Any) -> None:
        self._cuda, self._stream = cuda, stream
        self._first, self._begun = self._known()
        self._rate = 0.0  # seconds of the host in a millisecond of the GPU; 0: not known yet

    def stamp(self) -> Any:
        """A mark behind all that was asked for so far."""
        event = self._cuda.Event()
        event.record(self._stream)
        return event

    def _known(self) -> tuple[Any, float]:
        """An event, and when the GPU came to it."""
        self._stream.synchronize()
        before = time.perf_counter()
        event = self.stamp()
        event.synchronize()
        return event, (before + time.perf_counter()) / 2

    def seconds(self, stamp: Any) -> float:
        """When the GPU came to a mark, by the host's `time.perf_counter`."""
        if isinstance(stamp, float):
            return stamp
        if not self._rate:
            last, ended = self._known()
            self._rate = (ended - self._begun) / self._cuda.get_elapsed_time(self._first, last)
        return float(self._begun + self._cuda.get_elapsed_time(self._first, stamp) * self._rate)


Device = Host | Cuda
HOST = Host()
_in_use: Device = HOST


def in_use() -> Device:
    """The device of this process."""
    return _in_use


def use(name: str, on_node: int = 0) -> Device:
    """Choose the device of this process: "cpu", "cuda", or "auto", a GPU where CuPy finds one.

    Of several GPUs a rank takes the one of its number on the node, over again where ranks are more; `on_node`
    is that number where the launcher does not tell it. Raises UsageError where a GPU is asked for and there
    is none.
    """
    count = 0 if name == "cpu" else gpus()
    if name == "cuda" and not count:
        raise UsageError(f"--device cuda: {why_no_gpu()}")
    told = local_rank()
    return adopt(Cuda((on_node if told is None else told) % count) if count else HOST)


def claim(name: str) -> None:
    """Take this rank's GPU before MPI starts, where the launcher tells which it is.

    MPI libraries look for the GPU of the thread that starts them. What goes wrong is not said here: `use`
    meets it again, when all ranks can agree on it.
    """
    number, count = local_rank(), 0 if name == "cpu" else gpus()
    if number is not None and count:
        cuda = import_cupy().cuda
        with contextlib.suppress(cuda.runtime.CUDARuntimeError):
            cuda.Device(number % count).use()
            cuda.runtime.free(0)  # nothing but that there is a context now


def adopt(chosen: Device) -> Device:
    """Compute on a device from now on."""
    global _in_use
    _in_use = chosen
    return chosen


def local_rank() -> int | None:
    """This rank's number on its node as the launcher tells it, before MPI is started; None: it does not."""
    for name in LOCAL_RANK:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return None


def import_cupy() -> Any:
    """CuPy. Raises UsageError where it is not installed."""
    try:
        import cupy
    except ImportError as error:
        raise UsageError(
            "--device cuda needs CuPy: pip install 'zero-mpi[cuda12]' or 'zero-mpi[cuda13]', as the driver is"
        ) from error
    return cupy


def gpus() -> int:
    """How many GPUs CuPy finds; 0 also where there is no CuPy or no driver."""
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # no CuPy; or CUDARuntimeError, which is known only with it
        return 0


def why_no_gpu() -> str:
    """What CuPy says where it finds no GPU, in one line. Raises UsageError where it is not installed."""
    cupy = import_cupy()
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no GPU that can be used: {str(error).splitlines()[0]}; see python -m zero_mpi.doctor"
    return "CuPy finds no GPU; see python -m zero_mpi.doctor"


def is_cupy(x: Array) -> bool:
    """Whether `x` is a CuPy array, without importing CuPy for the answer."""
    return type(x).__module__.partition(".")[0] == "cupy"


def home_of(x: Array) -> Device:
    """The device that an array lies on."""
    return in_use() if is_cupy(x) else HOST


def namespace(x: Array) -> Any:
    """The array module of `x`: cupy for a CuPy array, numpy for anything else."""
    return sys.modules["cupy"] if is_cupy(x) else np
