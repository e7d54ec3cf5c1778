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


class _Loan(weakref.ref[Any]):
    """Watches the owner of a fake array's addresses, which lives as long as any view of it."""

    __slots__ = ("memory", "size")
    memory: FakeMemory
    size: int


def _came_back(loan: _Loan) -> None:
    loan.memory.give(loan)


class FakeMemory:
    """Counts what fake arrays would take, and what making them would cost.

    held, small   bytes of recycled blocks; the most at any time in arrays that are too small for these
    logits        bytes of the largest piece of logits, which is one of the recycled blocks
    flop, moved   floating-point operations of products; bytes that go through other operations
    kernels   what operations take beside their results (`plan.workspaces`)
    """

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self.held = self.small = self.logits = 0
        self.flop = self.moved = 0.0
        self._small_now = 0
        self._free: Counter[int] = Counter()  # blocks by size class
        self._loans: dict[int, _Loan] = {}
        self._arena = self._reserve(LEAST_ARENA)

    def take(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
        """A fake array that is counted, as `arrays.recycled` would place it."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        owner = self._addresses(nbytes)
        loan = _Loan(owner, _came_back)
        loan.memory, loan.size = self, size_class(nbytes) if nbytes >= RECYCLED_FROM else -nbytes
        self._loans[id(loan)] = loan
        if loan.size < 0:
            self._small_now += nbytes
            self.small = max(self.small, self._small_now)
        elif loan.size > 0 and self._free[loan.size]:
            self._free[loan.size] -= 1
        else:
            self.held += loan.size
        return self._fake(shape, dtype, owner)

    def give(self, loan: _Loan) -> None:
        """The last view of a fake array is gone."""
        del self._loans[id(loan)]
        if loan.size < 0:
            self._small_now += loan.size
        else:
            self._free[loan.size] += 1

    def outside(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
        """A fake array that is not counted: its memory belongs to somebody else."""
        return self._fake(shape, dtype, self._addresses(math.prod(shape) * np.dtype(dtype).itemsize))

    def _addresses(self, nbytes: int) -> Any:
        """An owner of `nbytes` addresses; all fake arrays may have the same ones."""
        if nbytes > len(self._arena):
            self._arena = self._reserve(1 << nbytes.bit_length())
        return (ctypes.c_char * max(1, nbytes)).from_buffer(self._arena)

    def _reserve(self, size: int) -> mmap.mmap:
        """`size` addresses; raises MemoryError."""
        try:
            return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
        except OSError as error:
            raise MemoryError(f"{size} bytes of address space: {error.strerror}") from error

    def _fake(self, shape: tuple[int, ...], dtype: Any, owner: Any) -> Array:
        fake = FakeArray(shape, dtype, owner)
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
