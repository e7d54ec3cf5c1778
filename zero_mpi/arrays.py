"""Arrays: which module they belong to, where they lie in memory, and buffers that are used again.

Everything above this module computes on "an array", NumPy's or CuPy's; `namespace` gives the module
whose functions apply to it. `BufferPool` hands out the large flat buffers of the runtime (gathered
units, gradients of a unit), which are given back by hand; `recycled` the activations, whose memory comes back
by itself when the last view of it is gone. Both only grow, so that a training step allocates nothing large
once each size has been seen.
"""

from __future__ import annotations

import ctypes
import math
import sys
import weakref
from dataclasses import dataclass
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


def side_by_side(parts: tuple[Array, ...]) -> Array | None:
    """The array (..., W) whose columns, without gaps, the parts (..., heads, width) are, or None."""
    joint = parts[0].base
    if not isinstance(joint, np.ndarray) or any(part.base is not joint for part in parts):
        return None
    place = joint.__array_interface__["data"][0]
    for part in parts:
        lengths = part.shape[:-2]
        steps = zip(lengths, part.strides, joint.strides, strict=False)
        if lengths != joint.shape[:-1] or any(mine != whole for n, mine, whole in steps if n > 1):
            return None
        if part.__array_interface__["data"][0] != place:
            return None
        place += part.shape[-2] * part.shape[-1] * joint.itemsize
    complete = sum(part.shape[-2] * part.shape[-1] for part in parts) == joint.shape[-1]
    return joint if complete and joint.flags.c_contiguous else None


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


# ------------------------------------------------------------------------- memory that comes back by itself

RECYCLED_FROM = 16 << 10  # bytes; below it the C library's own allocator is as good


class _Block:
    """Memory of one size class, for ever in the pool: lent, or in the list `home` of the free ones."""

    __slots__ = ("home", "kind", "lease", "memory")

    def __init__(self, size: int, home: list[_Block]) -> None:
        self.memory = empty(size, np.uint8)
        self.kind = ctypes.c_char * size
        self.home = home
        self.lease: _Lease | None = None


class _Lease(weakref.ref[Any]):
    """Watches the owner of a lent block, an object that lives as long as any array on it."""

    __slots__ = ("block",)
    block: _Block


def _came_back(lease: _Lease) -> None:
    lease.block.lease = None
    lease.block.home.append(lease.block)


_blocks: list[_Block] = []
_free: dict[int, list[_Block]] = {}  # by size class; append and pop of a list need no lock


def size_class(nbytes: int) -> int:
    """`nbytes` rounded up to one of eight sizes between a power of two and the next."""
    step = 1 << max(6, (nbytes - 1).bit_length() - 4)
    return -(-nbytes // step) * step


def recycled(shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    """An uninitialised array that starts at a cache line, on memory that was used before.

    The array's base is an object made for this loan. NumPy keeps a reference to it for every view, and for
    views of views; when the last one is gone the memory may be lent again. Nothing has to be given back, and
    what is still referenced is never lent.
    """
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if nbytes < RECYCLED_FROM:
        return np.empty(shape, dtype)
    size = size_class(nbytes)
    home = _free.get(size)
    if home is None:
        home = _free.setdefault(size, [])
    try:
        block = home.pop()
    except IndexError:
        block = _Block(size, home)
        _blocks.append(block)
    owner: Any = block.kind.from_buffer(block.memory)
    block.lease = lease = _Lease(owner, _came_back)
    lease.block = block
    return np.ndarray(shape, dtype, owner)


@dataclass(frozen=True)
class RecycledStats:
    """The pool of `recycled`: bytes in all, bytes that arrays refer to, allocations made so far."""

    held: int
    lent: int
    fresh: int


def recycled_stats() -> RecycledStats:
    """What the pool of this process holds now."""
    blocks = list(_blocks)
    lent = sum(block.memory.nbytes for block in blocks if block.lease is not None)
    return RecycledStats(sum(block.memory.nbytes for block in blocks), lent, len(blocks))
