"""Matrices in quantized blocks: `PackedMatrix`, for layers that only run forward, and `PackedStack`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from zero_mpi import ops
from zero_mpi.device.arrays import recycled
from zero_mpi.device.types import Array
from zero_mpi.ops.block_kinds import BLOCK_KINDS, PACKED

FEW = 8  # maximum number of input rows that multiply blocks directly; for more, the matrix is unpacked


@dataclass(frozen=True)
class PackedMatrix:
    """Matrix (O, C) in blocks of a `PACKED` kind, raw (O, bytes of a row) uint8. Slices share its memory."""

    raw: Array
    kind: str

    @property
    def shape(self) -> tuple[int, int]:
        block = BLOCK_KINDS[self.kind]
        return len(self.raw), self.raw.shape[1] // block.nbytes * block.elements

    def __getitem__(self, part: slice) -> PackedMatrix:
        return PackedMatrix(self.raw[part], self.kind)

    def rows(self, places: Array) -> Array:
        """Return the rows at indices `places` (...), as float32 (..., C)."""
        y = np.empty((*places.shape, self.shape[1]), np.float32)
        ops.dequantize(self.raw[places].reshape(-1), self.kind, y.reshape(-1))
        return y

    def linear(self, x: Array, b: Array | None = None, plus: Array | None = None) -> Array:
        """Return y (..., O) = x (..., C) W^T + b + plus, like `ops.linear`."""
        count = x.size // x.shape[-1]
        if count > FEW or not ops.compiles():
            w = recycled(self.shape, x.dtype)
            ops.dequantize(self.raw.reshape(-1), self.kind, w.reshape(-1))
            return ops.linear(x, w, b, plus)
        from zero_mpi.ops.cpu.decode import crew, instructions, product

        y = recycled((*x.shape[:-1], self.shape[0]), x.dtype)
        program = instructions([product(self, np.ascontiguousarray(x), y)])
        crew().run(program, np.zeros(count, np.int64))
        for addend in (b, plus):
            if addend is not None:
                y += addend
        return y


@dataclass(frozen=True)
class PackedStack:
    """Frozen matrices (N, O, C) in blocks, raw (N, bytes of a matrix) uint8. An integer index unpacks one
    matrix, rounds it to `stored_type` and returns it in the type `dtype`."""

    raw: Array
    kind: str
    shape: tuple[int, ...]
    stored_type: Any
    dtype: Any

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return replace(self, raw=self.raw[index], shape=(len(self.raw[index]), *self.shape[1:]))
        w = recycled(self.shape[1:], self.stored_type)
        ops.dequantize(self.raw[index], self.kind, w.reshape(-1))
        return w.astype(self.dtype, copy=False)

    def astype(self, dtype: Any) -> PackedStack:
        return replace(self, dtype=np.dtype(dtype))


def packs(kind: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor can be a `PackedMatrix`: its kind is in `PACKED`, its rows are full blocks."""
    return kind in PACKED and len(shape) == 2 and shape[1] % BLOCK_KINDS[kind].elements == 0
