"""The host as a device, with NumPy arrays."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import time
from typing import Any

import numpy as np

from zero_mpi.device.types import ALIGNMENT, Array

HUGE_PAGE = 2 << 20  # bytes, on x86-64 and other processors with pages of 4 KiB


class Marker:
    """Marker after work that is already complete, because the host computes synchronously."""

    done = True

    def wait(self) -> None:
        """Return when the work before the marker is complete."""


class Host:
    """The host as a device: NumPy arrays in the process's own memory."""

    name = about = "cpu"
    stream: Any = None  # a GPU has its computing stream here
    activations: Any = None  # the pool (`arrays.Recycler`), made by `arrays.pool_of`
    chunk = 64 << 20  # bytes that a pool allocates at a time; unwritten pages take no memory

    def empty(self, size: int, dtype: Any = np.float32) -> Array:
        """Return a flat uninitialised array that starts at a cache line.

        With equal alignment, vector code takes the same path for every rank's slice.
        """
        itemsize = np.dtype(dtype).itemsize
        raw = np.empty(size * itemsize + ALIGNMENT, np.uint8)
        skip = -raw.ctypes.data % ALIGNMENT
        return raw[skip : skip + size * itemsize].view(dtype)

    def zeros(self, size: int, dtype: Any = np.float32) -> Array:
        array = self.empty(size, dtype)
        array.fill(0)
        return array

    def lasting(self, nbytes: int) -> Array:
        """Return uninitialised bytes for a pool, in huge pages if the system has them.

        A processor caches the addresses of a few thousand pages. With pages of 4 KiB that covers a few
        megabytes, less than a step's activations.
        """
        memory = mmap.mmap(-1, nbytes + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # some kernels lack huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        raw = np.frombuffer(memory, np.uint8)
        skip = -raw.ctypes.data % HUGE_PAGE
        return raw[skip : skip + nbytes]

    def lend(self, memory: Array, shape: tuple[int, ...], dtype: Any) -> tuple[Any, Array]:
        """Return (owner, array): an array in flat `memory`, whose views keep the object `owner` alive."""
        owner: Any = (ctypes.c_char * memory.nbytes).from_buffer(memory)
        return owner, np.ndarray(shape, dtype, owner)

    def small(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an uninitialised array from the library's allocator, for sizes that are not recycled."""
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
        """Copy arrays, given as (target, source); return a marker after the last copy."""
        for target, source in pairs:
            target[...] = source
        return Marker()

    def before_update(self) -> None:
        """Order later computation after the copies of `fetch`, which are already complete."""

    def mark(self) -> Any:
        """Return a marker after all work so far, which is already complete on the host."""
        return Marker()

    def wait_for(self, mark: Any) -> None:
        """Return immediately: the work before a marker is complete."""

    def synchronize(self) -> None:
        """Return when all work is complete."""

    def memory_in_use(self) -> int:
        """Return the bytes of host memory of this process, including memory shared with other processes."""
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE

    def stopwatch(self) -> HostStopwatch:
        return HostStopwatch()


class HostStopwatch:
    """The host's clock. Work is complete when its call returns, so a stamp is the current time."""

    stamp = staticmethod(time.perf_counter)

    def seconds(self, stamp: float) -> float:
        return stamp


HOST = Host()
