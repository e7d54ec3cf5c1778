"""Arrays without memory: shapes, strides and views are NumPy's, over addresses that nobody reads or writes.

Layers run on these arrays as they are. Each result that an operation makes is counted by the rules of
`arrays.recycled`: rounded up to its size class, placed where the last view of an earlier one is gone, never
given back. So what layers keep for backward, and when they let go of it, is seen and not modelled.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from zero_mpi import device
from zero_mpi.device import Host
from zero_mpi.device.arrays import RECYCLED_FROM, size_class
from zero_mpi.device.types import Array

NO_RESERVE = 0x4000  # Linux: address space alone, without a claim to memory; mmap has no name for it yet
LEAST_ARENA = 1 << 30  # bytes


class FakeArray(np.ndarray[Any, Any]):
    """An array that must not be read or written; `memory` is what its results are counted in."""

    memory: FakeMemory | None

    def __array_finalize__(self, source: Any) -> None:
        self.memory = getattr(source, "memory", None)

    def fill(self, value: Any) -> None:
        """Count one pass over the array."""
        if self.memory is not None:
            self.memory.passes(self)


class FakeMemory:
    """Counts what fake arrays would take, and what making them would cost; `plan.workspaces` has its kinds.

    held, small   bytes of recycled blocks; the most at any time in arrays that are too small for these
    logits        bytes of the largest piece of logits, which is one of the recycled blocks
    flop, moved   floating-point operations of products; bytes that go through other operations
    """

    def __init__(self) -> None:
        self.held = self.small = self.logits = 0
        self.flop = self.moved = 0.0
        self._small_now = 0
        self._free: Counter[int] = Counter()  # blocks by size class
        self._arena: Any = b""

    def take(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
        """A fake array that is counted, as `arrays.recycled` would place it."""
        fake = self.outside(shape, dtype)
        block = size_class(fake.nbytes) if fake.nbytes >= RECYCLED_FROM else 0
        if not block:
            self._small_now += fake.nbytes
            self.small = max(self.small, self._small_now)
        elif self._free[block]:
            self._free[block] -= 1
        else:
            self.held += block
        # Views of any kind keep the owner of the addresses.
        weakref.finalize(fake.base, self._give, block, fake.nbytes).atexit = False
        return fake

    def _give(self, block: int, nbytes: int) -> None:
        """The last view of a fake array is gone."""
        if block:
            self._free[block] += 1
        else:
            self._small_now -= nbytes

    def outside(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
        """A fake array that is not counted: its memory belongs to somebody else; raises MemoryError."""
        nbytes = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
        if nbytes > len(self._arena):  # all fake arrays may have the same addresses
            size = max(LEAST_ARENA, 1 << nbytes.bit_length())
            try:
                self._arena = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
            except OSError as error:
                raise MemoryError(f"{size} bytes of address space: {error.strerror}") from error
        fake = FakeArray(shape, dtype, (ctypes.c_char * nbytes).from_buffer(self._arena))
        fake.memory = self
        return fake

    def product(self, rows: int, columns: int, depth: int) -> None:
        """Count a product of matrices (rows, depth) and (depth, columns)."""
        self.flop += 2.0 * rows * columns * depth

    def passes(self, *arrays: Array) -> None:
        """Count one pass over each of the arrays."""
        self.moved += sum(array.nbytes for array in arrays)

    def spent(self) -> tuple[float, float]:
        """(flop, moved) since the last call."""
        spent, self.flop, self.moved = (self.flop, self.moved), 0.0, 0.0
        return spent


class NoMemory(Host):
    """A device whose arrays are fake and belong to somebody else: what a module keeps is counted apart."""

    def __init__(self, memory: FakeMemory) -> None:
        self._memory = memory

    def empty(self, size: int, dtype: Any = np.float32) -> Array:
        """A flat fake array."""
        return self._memory.outside((size,), dtype)

    zeros = empty


@contextmanager
def without_memory(memory: FakeMemory) -> Iterator[None]:
    """Compute on fake arrays for a while, whatever the device in use is."""
    in_use = device.in_use()
    device.adopt(NoMemory(memory))
    try:
        yield
    finally:
        device.adopt(in_use)
