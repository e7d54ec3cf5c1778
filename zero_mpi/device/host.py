"""Arrays of the host: NumPy's, in the process's own memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import time
from typing import Any

import numpy as np

from zero_mpi.device.types import ALIGNMENT, Array

HUGE_PAGE = 2 << 20  # bytes, on x86-64 and on others with pages of 4 KiB


class Done:
    """A mark behind work that is complete already: the host computes at once."""

    done = True

    def wait(self) -> None:
        """Return when the work before the mark is complete."""


class Host:
    """NumPy arrays in the process's own memory."""

    name = about = "cpu"
    stream: Any = None  # on a GPU the stream that computes
    activations: Any = None  # the `arrays.Recycler` in use; None: `arrays.pool_of` makes it
    chunk = 64 << 20  # bytes that a pool takes at once; pages without a write take no memory

    def empty(self, size: int, dtype: Any = np.float32) -> Array:
        """Return a flat uninitialised array that starts at a cache line.

        The same alignment everywhere keeps vector code on the same path whatever slice a rank holds.
        """
        itemsize = np.dtype(dtype).itemsize
        raw = np.empty(size * itemsize + ALIGNMENT, np.uint8)
        skip = -raw.ctypes.data % ALIGNMENT
        return raw[skip : skip + size * itemsize].view(dtype)

    def zeros(self, size: int, dtype: Any = np.float32) -> Array:
        """Return a flat array of zeros, aligned as `empty`."""
        array = self.empty(size, dtype)
        array.fill(0)
        return array

    def lasting(self, nbytes: int) -> Array:
        """Return uninitialised bytes that a pool keeps: in huge pages, where the system has them.

        A processor keeps the addresses of some thousand pages. In pages of 4 KiB these are a few megabytes,
        and a step walks through all of its activations.
        """
        memory = mmap.mmap(-1, nbytes + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
        raw = np.frombuffer(memory, np.uint8)
        skip = -raw.ctypes.data % HUGE_PAGE
        return raw[skip : skip + nbytes]

    def lend(self, memory: Array, shape: tuple[int, ...], dtype: Any) -> tuple[Any, Array]:
        """Return (owner, array): an array on flat `memory`, and an object that lives as long as its views."""
        owner: Any = (ctypes.c_char * memory.nbytes).from_buffer(memory)
        return owner, np.ndarray(shape, dtype, owner)

    def small(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an uninitialised array too small to be worth more than the library's own allocator."""
        return np.empty(shape, dtype)

    def from_host(self, x: Array) -> Array:
        return x

    def to_host(self, x: Array) -> Array:
        return x

    def copy(self, target: Array, source: Array) -> None:
        target[...] = source

    def pinned(self, nbytes: int) -> Array:
        return self.empty(nbytes, np.uint8)

    def fetch(self, pairs: list[tuple[Array, Array]]) -> Any:
        """Copy arrays, as (target, source); return a mark behind the last copy."""
        for target, source in pairs:
            target[...] = source
        return Done()

    def before_update(self) -> None:
        """Order later computing after the copies of `fetch`, which are complete."""

    def mark(self) -> Any:
        """Return a mark in the order of work; on the host, work is complete when its call returns."""
        return Done()

    def wait_for(self, mark: Any) -> None:
        """Order later computing after a mark."""

    def synchronize(self) -> None:
        """Return when all work is complete."""

    def memory_in_use(self) -> int:
        """Return the bytes of this process in the host's memory, what it shares with others included."""
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE

    def stopwatch(self) -> HostStopwatch:
        return HostStopwatch()


class HostStopwatch:
    """The host's clock: work is done when its call returns, so a stamp is the time."""

    stamp = staticmethod(time.perf_counter)

    def seconds(self, stamp: float) -> float:
        """Return `stamp` itself, a time of `time.perf_counter`."""
        return stamp


HOST = Host()
