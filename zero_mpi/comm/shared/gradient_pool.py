"""Gradient buffers in memory that all ranks see, so that an owner adds them where they were written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from zero_mpi.device import HOST
from zero_mpi.device.arrays import BufferPool
from zero_mpi.device.types import ALIGNMENT, Array

FLOAT = np.dtype(np.float32)


def padded(length: int) -> int:
    """Return the bytes of `length` float32 elements, up to the next cache line."""
    return -(-length * FLOAT.itemsize // ALIGNMENT) * ALIGNMENT


def window_bytes(wholes: Iterable[int], buffers: Iterable[int], ranks: int) -> int:
    """Return the bytes of a node's window, from elements: the wholes once, the buffers of each rank."""
    return max(1, sum(map(padded, wholes)) + ranks * sum(map(padded, buffers)))


class SharedGradientPool(BufferPool):
    """A pool that cannot grow: this rank's block of shared memory, cut into buffers of the given lengths.

    `blocks`: the blocks of all ranks, as bytes; they are cut alike, but ranks may lend in another order.
    """

    def __init__(self, blocks: Sequence[Array], rank: int, lengths: Sequence[int]) -> None:
        super().__init__(where=HOST)
        self.blocks = list(blocks)
        self.start = int(blocks[rank].ctypes.data)
        self.stop = self.start + int(blocks[rank].size)
        offset = 0
        for length in lengths:
            self._free.append(blocks[rank][offset : offset + length * FLOAT.itemsize].view(FLOAT))
            offset += padded(length)

    def take(self, size: int) -> Array:
        """Return a free slot, as from a BufferPool, but one that fits must be there."""
        assert any(buffer.size >= size for buffer in self._free), f"no gradient slot of {size} elements left"
        return super().take(size)

    def offset(self, array: Array) -> int | None:
        """Return where in this rank's block an array begins, in bytes; None if it lies elsewhere."""
        first = int(array.ctypes.data)
        return first - self.start if self.start <= first < self.stop else None

    def of_rank(self, rank: int, offset: int, array: Array, part: slice) -> Array:
        """Return the elements `part` of the array like `array` that begins at `offset` in `rank`'s block."""
        first, last = (offset + index * array.itemsize for index in (part.start, part.stop))
        return self.blocks[rank][first:last].view(array.dtype)
