"""RMSNorm and LayerNorm on a GPU.

Up to 32 neighbouring threads, or for wide rows up to 256, work on a row. In backward a block takes many rows
and sums the gradients of w and b on its way; how many blocks there are depends on the rows alone, so that the
bits do not depend on the GPU.
"""

from __future__ import annotations

from functools import lru_cache

from zero_mpi.device.types import Array
from zero_mpi.ops import reference
from zero_mpi.ops.gpu.launch import (
    ARRAY,
    F32,
    PACK,
    THREADS,
    Family,
    at,
    f4,
    packed,
    take,
    writable,
)
from zero_mpi.ops.gpu.sums import add_partials
from zero_mpi.ops.registry import implements
from zero_mpi.ops.sizes import HELD, NORM_LINES, norm_blocks, norm_lanes

RMS_NORM = Family("norm.cu", "rms_norm", "PPPPLLLF")
RMS_NORM_BACKWARD = Family("norm.cu", "rms_norm_backward", "PPPPPPPLLL")
LAYER_NORM = Family("norm.cu", "layer_norm", "PPPPPPLLLF")
LAYER_NORM_BACKWARD = Family("norm.cu", "layer_norm_backward", "PPPPPPPPPLLL")
HELD_TWICE = 3  # packs of sums that a thread holds of both dw and db, as in norm.cu; of dw alone HELD


@lru_cache
def deal(rows: int, width: int, pack: int, held: int) -> tuple[int, int, int, int]:
    """Return (lanes, blocks forward, lines of partial sums, blocks backward)."""
    lanes = norm_lanes(width, pack, held)
    blocks = norm_blocks(rows, lanes)
    lines = min(NORM_LINES, blocks)
    return lanes, blocks, lines, lines * -(-width // (lanes * pack * held))


@implements(reference.rms_norm, ARRAY)
def rms_norm(x: Array, w: Array, eps: float) -> tuple[Array, Array]:
    """Compute `reference.rms_norm`; r is float32."""
    kernel = RMS_NORM[x.dtype]
    x, w, width = packed(x), packed(w), x.shape[-1]
    y, r = take(x.shape, x.dtype), take((*x.shape[:-1], 1), F32)
    rows = x.size // width
    lanes, blocks, _, _ = deal(rows, width, PACK // x.itemsize, HELD)
    kernel(blocks, THREADS, (at(x), at(w), at(y), at(r), rows, width, lanes, f4(eps)))
    return y, r


@implements(reference.rms_norm_backward, ARRAY)
def rms_norm_backward(
    dy: Array, x: Array, w: Array, r: Array, dw: Array | None, plus: Array | None = None
) -> Array:
    """Compute `reference.rms_norm_backward`; dw may have any of the types."""
    kernel = RMS_NORM_BACKWARD[x.dtype]
    writable("rms_norm_backward", dw)
    dy, x, w, r = packed(dy), packed(x), packed(w), packed(r)
    plus = None if plus is None else packed(plus)
    dx, width = take(x.shape, x.dtype), x.shape[-1]
    rows = x.size // width
    lanes, _, lines, blocks = deal(rows, width, PACK // x.itemsize, HELD)
    partial = None if dw is None else take((lines, width), F32)
    kernel(
        blocks,
        THREADS,
        (at(dy), at(x), at(w), at(r), at(plus), at(dx), at(partial), rows, width, lanes),
    )
    if dw is not None and rows:
        add_partials(dw, partial)
    return dx


@implements(reference.layer_norm, ARRAY)
def layer_norm(x: Array, w: Array, b: Array, eps: float) -> tuple[Array, Array, Array]:
    """Compute `reference.layer_norm`; mean and r are float32."""
    kernel = LAYER_NORM[x.dtype]
    x, w, b, width = packed(x), packed(w), packed(b), x.shape[-1]
    y, shape = take(x.shape, x.dtype), (*x.shape[:-1], 1)
    mean, r = take(shape, F32), take(shape, F32)
    rows = x.size // width
    lanes, blocks, _, _ = deal(rows, width, PACK // x.itemsize, HELD_TWICE)
    kernel(blocks, THREADS, (at(x), at(w), at(b), at(y), at(mean), at(r), rows, width, lanes, f4(eps)))
    return y, mean, r


@implements(reference.layer_norm_backward, ARRAY)
def layer_norm_backward(
    dy: Array,
    x: Array,
    w: Array,
    mean: Array,
    r: Array,
    dw: Array | None,
    db: Array | None,
    plus: Array | None = None,
) -> Array:
    """Compute `reference.layer_norm_backward`; dw and db may have any of the types."""
    kernel = LAYER_NORM_BACKWARD[x.dtype]
    writable("layer_norm_backward", dw, db)
    dy, x, w, mean, r = packed(dy), packed(x), packed(w), packed(mean), packed(r)
    plus = None if plus is None else packed(plus)
    dx, width = take(x.shape, x.dtype), x.shape[-1]
    rows = x.size // width
    lanes, _, lines, blocks = deal(rows, width, PACK // x.itemsize, HELD_TWICE)
    sums = [None if gradient is None else take((lines, width), F32) for gradient in (dw, db)]
    pointers = (at(dy), at(x), at(w), at(mean), at(r), at(plus), at(dx), at(sums[0]), at(sums[1]))
    kernel(blocks, THREADS, (*pointers, rows, width, lanes))
    if rows and dw is not None and db is not None and dw.dtype == db.dtype:
        add_partials(dw, sums[0], db, sums[1])
        return dx
    for gradient, partial in zip((dw, db), sums, strict=True):
        if gradient is not None and rows:
            add_partials(gradient, partial)
    return dx
