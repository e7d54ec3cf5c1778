"""Arrays: which module they belong to, where they lie in memory, and buffers that are used again.

Everything above this module computes on "an array", NumPy's or CuPy's; `namespace` gives the module
whose functions apply to it. `BufferPool` hands out the large flat buffers of the runtime (gathered
units, gradients of a unit): it only grows, so that a training step allocates none once each size has
been seen.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np

Array = Any  # numpy.ndarray or cupy.ndarray: the two share the methods that are used here

ALIGNMENT = 64  # bytes: a cache line, and the width of the widest CPU vector registers


def namespace(x: Array) -> ModuleType:
    """The array module of `x`: cupy for a CuPy array, numpy for anything else."""
    if type(x).__module__.partition(".")[0] == "cupy":
        return sys.modules["cupy"]
    return np


def empty(size: int, dtype: Any = np.float32) -> Array:
    """A flat uninitialised array of `size` elements that starts at a cache line.

    The same alignment everywhere keeps vector code on the same path whatever slice a rank holds.
    """
    itemsize = np.dtype(dtype).itemsize
    raw = np.empty(size * itemsize + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + size * itemsize].view(dtype)


def zeros(size: int, dtype: Any = np.float32) -> Array:
    """A flat array of `size` zeros, aligned as `empty`."""
    array = empty(size, dtype)
    array.fill(0)
    return array


class BufferPool:
    """Flat buffers that are lent and given back. It grows when it must and never shrinks.

    `take` returns a buffer of at least the wanted size, so that a caller who needs less cuts it.
    """

    def __init__(self, dtype: Any = np.float32) -> None:
        self.dtype = np.dtype(dtype)
        self._free: list[Array] = []
        self._lent: dict[int, Array] = {}
        self.peak_lent = 0  # the most buffers that were out at once

    def take(self, size: int) -> Array:
        """A buffer of at least `size` elements: the smallest free one that fits, else a new one."""
        fitting = [buffer for buffer in self._free if buffer.size >= size]
        if fitting:
            buffer = min(fitting, key=lambda candidate: int(candidate.size))
            self._free = [other for other in self._free if other is not buffer]
        else:
            buffer = empty(size, self.dtype)
        self._lent[id(buffer)] = buffer
        self.peak_lent = max(self.peak_lent, len(self._lent))
        return buffer

    def give(self, buffer: Array) -> None:
        """Take back a buffer that `take` lent."""
        assert self._lent.pop(id(buffer), None) is buffer, "this buffer is not lent by this pool"
        self._free.append(buffer)

    @property
    def lent(self) -> int:
        """How many buffers are out."""
        return len(self._lent)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, lent or free."""
        return sum(int(buffer.nbytes) for buffer in [*self._free, *self._lent.values()])
