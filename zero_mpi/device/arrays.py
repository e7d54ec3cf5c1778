"""Helpers for NumPy and CuPy arrays, and pools of reusable buffers.

Other modules compute on arrays of NumPy or CuPy. `namespace` returns the module whose functions apply to an
array, and `device.home_of` returns the device that holds it. `BufferPool` lends the large flat buffers of the
runtime (gathered units, gradients of a unit), which callers return explicitly. `recycled` lends memory for
activations, which returns to the pool when its last view is deleted. Neither pool shrinks during training, so
a step allocates no large memory once each size has been used.
"""

from __future__ import annotations

import math
import threading
import weakref
from functools import lru_cache
from typing import Any

import numpy as np

from zero_mpi import device
from zero_mpi.device import HOST, Device
from zero_mpi.device.types import Array

Scalar = Any  # a float, or on a GPU a 0-dimensional array, so that the host need not wait for it
namespace = device.namespace
empty = HOST.empty  # always in host memory


def read_only(array: Array) -> Array:
    """Return a read-only view of an array that all ranks share."""
    view = array.view()
    if not device.is_cupy(view):  # CuPy arrays have no such flag
        view.flags.writeable = False
    return view


def address(x: Array) -> int:
    return int(x.data.ptr) if device.is_cupy(x) else int(x.ctypes.data)


def to_device_of(x: Array, other: Array) -> Array:
    return device.in_use().from_host(x) if device.is_cupy(other) else x


def side_by_side(parts: tuple[Array, ...]) -> Array | None:
    """Return the array (..., W) if `parts` (..., heads, width) are its adjacent columns, else None."""
    joint = parts[0].base
    if not isinstance(joint, type(parts[0])) or any(part.base is not joint for part in parts):
        return None
    place = address(joint)
    for part in parts:
        lengths = part.shape[:-2]
        steps = zip(lengths, part.strides, joint.strides, strict=False)
        if lengths != joint.shape[:-1] or any(step != joint_step for n, step, joint_step in steps if n > 1):
            return None
        if address(part) != place:
            return None
        place += part.shape[-2] * part.shape[-1] * joint.itemsize
    complete = place - address(joint) == joint.shape[-1] * joint.itemsize
    return joint if complete and joint.flags.c_contiguous else None


class BufferPool:
    """Pool of flat float32 buffers, which are lent and returned. A pool grows if necessary and never shrinks.

    `take` may return a longer buffer than requested, which the caller then slices. The buffers are on the
    device in use unless another device is given.
    """

    def __init__(self, where: Device | None = None) -> None:
        self._device = device.in_use() if where is None else where
        self._free: list[Array] = []
        self._lent: dict[int, Array] = {}

    def take(self, size: int) -> Array:
        """Return a buffer of at least `size` elements: the smallest free buffer that fits, or a new one."""
        fitting = [buffer for buffer in self._free if buffer.size >= size]
        buffer = min(fitting, key=lambda other: int(other.size)) if fitting else self._device.empty(size)
        self._free = [other for other in self._free if other is not buffer]
        self._lent[id(buffer)] = buffer
        return buffer

    def give(self, buffer: Array) -> None:
        assert self._lent.pop(id(buffer), None) is buffer, "this buffer is not lent by this pool"
        self._free.append(buffer)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of elements of each buffer, lent or free, longest first."""
        return tuple(sorted((int(b.size) for b in [*self._free, *self._lent.values()]), reverse=True))

    @property
    def nbytes(self) -> int:
        return sum(int(buffer.nbytes) for buffer in [*self._free, *self._lent.values()])


# ------------------------------------------------------------------------- memory that returns by itself

RECYCLED_FROM = 16 << 10  # bytes; for smaller arrays, the library's allocator is equally good


def size_class(nbytes: int) -> int:
    """Return `nbytes` rounded up to one of the eight sizes between two powers of two."""
    step = 1 << max(6, (nbytes - 1).bit_length() - 4)
    return -(-nbytes // step) * step


@lru_cache(4096)
def class_of(shape: tuple[int, ...], dtype: Any) -> int:
    """Return the size class of an array, or 0 if it is too small to recycle."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    return 0 if nbytes < RECYCLED_FROM else size_class(nbytes)


class _Block:
    """Memory of one size class in the pool, either lent or in `home`, the list of free blocks."""

    __slots__ = ("home", "lease", "memory")

    def __init__(self, memory: Array, home: list[_Block]) -> None:
        self.memory, self.home = memory, home
        self.lease: _Lease | None = None


class _Lease(weakref.ref[Any]):
    """Weak reference to the owner of a lent block, an object that lives as long as any array in the block."""

    __slots__ = ("block",)
    block: _Block


def _return_block(lease: _Lease) -> None:
    lease.block.lease = None
    lease.block.home.append(lease.block)


class Recycler:
    """Pool of device memory for activations. Memory returns to the pool when its last view is deleted.

    The base of an array is an object made for each loan. NumPy and CuPy keep a reference to it in every view,
    and in views of views. When the last view is deleted, the memory may be lent again. Callers return
    nothing, and memory that is still referenced is never lent again. On a GPU this is correct because all
    computations on activations are in the order of one stream.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._blocks: list[_Block] = []
        self._free: dict[int, list[_Block]] = {}  # by size class; append and pop of a list need no lock
        self._chunk_rest: Array | None = None  # unused rest of the last chunk
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
        """Return an uninitialised, aligned array; reuse a free block of its size class if there is one."""
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
        block.lease = lease = _Lease(owner, _return_block)
        lease.block = block
        return array

    def _cut(self, size: int) -> Array:
        """Return memory for a block, from the last chunk or from a new one."""
        with self._lock:
            if self._chunk_rest is None or self._chunk_rest.size < size:
                self._chunk_rest = self._device.lasting(max(size, self._device.chunk))
            memory, self._chunk_rest = self._chunk_rest[:size], self._chunk_rest[size:]
            return memory

    def trim(self) -> None:
        """Free memory that is not lent, for example before work with other sizes.

        A chunk is freed when all of its blocks are freed.
        """
        self._chunk_rest = None
        free = {id(block) for home in self._free.values() for block in home}
        self._blocks = [block for block in self._blocks if id(block) not in free]
        for home in self._free.values():
            home.clear()

    @property
    def nbytes(self) -> int:
        return sum(int(block.memory.nbytes) for block in list(self._blocks))


def pool_of(device: Device) -> Recycler:
    """Return the pool of recycled memory of a device."""
    pool: Recycler | None = device.activations
    if pool is None:
        pool = device.activations = Recycler(device)
    return pool


RECYCLED = pool_of(HOST)  # the host's pool, whatever the device is
recycled = RECYCLED.take
