"""Arrays: the module that they belong to, and buffers that are used again.

Everything above this module computes on "an array", NumPy's or CuPy's; `namespace` gives the module
whose functions apply to it, `device` says where they lie. `BufferPool` hands out the large flat buffers of
the runtime (gathered units, gradients of a unit), which are given back by hand; `recycled` the activations,
whose memory comes back by itself when the last view of it is gone. Both only grow, so that a training step
allocates nothing large once each size has been seen.
"""

from __future__ import annotations

import math
import threading
import weakref
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from zero_mpi import device
from zero_mpi.device import HOST, Device
from zero_mpi.device.types import Array

Scalar = Any  # a float; on a GPU an array without dimensions, so that nobody has to wait for it
namespace = device.namespace
empty = HOST.empty  # in the host's memory, whatever the device is


def read_only(whole: Array) -> Array:
    """Return a read-only view of an array that all ranks share."""
    view = whole.view()
    if not device.is_cupy(view):  # which has no such flag
        view.flags.writeable = False
    return view


def address(x: Array) -> int:
    """Return the address at which an array begins in its memory."""
    return int(x.data.ptr) if device.is_cupy(x) else int(x.ctypes.data)


def to_device_of(x: Array, other: Array) -> Array:
    """Return `x` where `other` lies: itself, or a copy on the GPU."""
    return device.in_use().from_host(x) if device.is_cupy(other) else x


def side_by_side(parts: tuple[Array, ...]) -> Array | None:
    """Return the array (..., W) whose columns, without gaps, the parts (..., heads, width) are, or None."""
    joint = parts[0].base
    if not isinstance(joint, type(parts[0])) or any(part.base is not joint for part in parts):
        return None
    place = address(joint)
    for part in parts:
        lengths = part.shape[:-2]
        steps = zip(lengths, part.strides, joint.strides, strict=False)
        if lengths != joint.shape[:-1] or any(step != whole for n, step, whole in steps if n > 1):
            return None
        if address(part) != place:
            return None
        place += part.shape[-2] * part.shape[-1] * joint.itemsize
    complete = place - address(joint) == joint.shape[-1] * joint.itemsize
    return joint if complete and joint.flags.c_contiguous else None


class BufferPool:
    """Flat float32 buffers that are lent and given back. It grows when it must and never shrinks.

    `take` returns a buffer of at least the wanted size, so that a caller who needs less cuts it. They lie
    on the device in use unless another is given.
    """

    def __init__(self, where: Device | None = None) -> None:
        self._device = device.in_use() if where is None else where
        self._free: list[Array] = []
        self._lent: dict[int, Array] = {}
        self.peak_lent = 0  # the most buffers that were out at once

    def take(self, size: int) -> Array:
        """Return a buffer of at least `size` elements: the smallest free one that fits, else a new one."""
        fitting = [buffer for buffer in self._free if buffer.size >= size]
        if fitting:
            buffer = min(fitting, key=lambda candidate: int(candidate.size))
            self._free = [other for other in self._free if other is not buffer]
        else:
            buffer = self._device.empty(size)
        self._lent[id(buffer)] = buffer
        self.peak_lent = max(self.peak_lent, len(self._lent))
        return buffer

    def give(self, buffer: Array) -> None:
        """Take back a buffer that `take` lent."""
        assert self._lent.pop(id(buffer), None) is buffer, "this buffer is not lent by this pool"
        self._free.append(buffer)

    @property
    def lent(self) -> int:
        """The number of buffers that are lent now."""
        return len(self._lent)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Elements of each buffer, lent or free, longest first."""
        return tuple(sorted((int(b.size) for b in [*self._free, *self._lent.values()]), reverse=True))

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, lent or free."""
        return sum(int(buffer.nbytes) for buffer in [*self._free, *self._lent.values()])


# ------------------------------------------------------------------------- memory that comes back by itself

RECYCLED_FROM = 16 << 10  # bytes; below it the library's own allocator is as good


def size_class(nbytes: int) -> int:
    """Return `nbytes` rounded up to one of eight sizes between a power of two and the next."""
    step = 1 << max(6, (nbytes - 1).bit_length() - 4)
    return -(-nbytes // step) * step


@lru_cache(4096)
def class_of(shape: tuple[int, ...], dtype: Any) -> int:
    """Return the size class of an array; 0 for one that is not worth recycling."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    return 0 if nbytes < RECYCLED_FROM else size_class(nbytes)


class _Block:
    """Memory of one size class, forever in the pool: lent, or in the list `home` of the free ones."""

    __slots__ = ("home", "lease", "memory")

    def __init__(self, memory: Array, home: list[_Block]) -> None:
        self.memory, self.home = memory, home
        self.lease: _Lease | None = None


class _Lease(weakref.ref[Any]):
    """Watches the owner of a lent block, an object that lives as long as any array on it."""

    __slots__ = ("block",)
    block: _Block


def _came_back(lease: _Lease) -> None:
    lease.block.lease = None
    lease.block.home.append(lease.block)


class RecycledStats(NamedTuple):
    """A pool of recycled memory: bytes in all, bytes that arrays refer to, allocations made so far."""

    held: int
    lent: int
    fresh: int


class Recycler:
    """Memory of a device for activations, which comes back when the last view of it is gone.

    The base of an array is an object made for this loan. NumPy and CuPy keep a reference to it for every
    view, and for views of views; when the last one is gone the memory may be lent again. Nothing has to be
    given back, and what is still referenced is never lent. On a GPU that is right because all that computes
    on activations is in the order of one stream.
    """

    def __init__(self, where: Device) -> None:
        self._device = where
        self._blocks: list[_Block] = []
        self._free: dict[int, list[_Block]] = {}  # by size class; append and pop of a list need no lock
        self._rest: Array | None = None  # rest of the last chunk
        self._cuts = threading.Lock()

    def take(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
        """Return an uninitialised, aligned array, on memory that was used before if some has its size."""
        size = class_of(shape, dtype)
        if not size:
            return self._device.small(shape, dtype)
        home = self._free.setdefault(size, [])
        try:
            block = home.pop()
        except IndexError:
            block = _Block(self._cut(size), home)
            self._blocks.append(block)
        owner, array = self._device.lend(block.memory, shape, dtype)
        block.lease = lease = _Lease(owner, _came_back)
        lease.block = block
        return array

    def _cut(self, size: int) -> Array:
        """Return memory for a block: of the last chunk, or of a new one."""
        with self._cuts:
            if self._rest is None or self._rest.size < size:
                self._rest = self._device.lasting(max(size, self._device.chunk))
            memory, self._rest = self._rest[:size], self._rest[size:]
            return memory

    def trim(self) -> None:
        """Free all memory that is not lent, for example before work with other sizes.

        A chunk goes when none of its blocks is left.
        """
        self._rest = None
        free = {id(block) for home in self._free.values() for block in home}
        self._blocks = [block for block in self._blocks if id(block) not in free]
        for home in self._free.values():
            home.clear()

    def stats(self) -> RecycledStats:
        """Return what the pool holds now."""
        blocks = list(self._blocks)
        lent = sum(int(block.memory.nbytes) for block in blocks if block.lease is not None)
        return RecycledStats(sum(int(block.memory.nbytes) for block in blocks), lent, len(blocks))


def pool_of(where: Device) -> Recycler:
    """Return the recycled memory of a device."""
    pool: Recycler | None = where.activations
    if pool is None:
        pool = where.activations = Recycler(where)
    return pool


_host = pool_of(HOST)
recycled, recycled_stats = _host.take, _host.stats  # the host's pool, whatever the device is
