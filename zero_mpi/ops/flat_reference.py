"""Definitions of operations on flat buffers: updates, averages, sums, and unpacking of GGUF blocks."""

import math

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize as unpacked

from zero_mpi.device.arrays import namespace
from zero_mpi.device.types import Array
from zero_mpi.ops.block_kinds import BLOCK_KINDS, CHUNK, PLAIN
from zero_mpi.ops.elementary import power
from zero_mpi.ops.registry import operation
from zero_mpi.ops.sizes import run_length

ADAMW_BLOCK = 1 << 16  # elements at a time: five arrays of this size stay in the second-level cache

# Order of the sums over rows in gradients of biases and norms. A single sum over thousands of rows loses
# one bit of precision whenever the number of rows grows fourfold. So rows are summed in blocks of LANES *
# LANE_ROWS: row i of a block is added to lane i mod LANES, the lanes are added in pairs, and then the blocks
# in order. This order depends only on the number of rows. GPU kernels use short sums in another order.
LANES, LANE_ROWS = 4, 16


@operation("p N, g N, m N, v N, decay R float64, low? N real; N == 0 or R > 0 and N % R == 0", widens=False)
def adamw(
    p: Array,
    g: Array,
    m: Array,
    v: Array,
    *,
    grad_scale: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: Array,
    step: int,
    low: Array | None = None,
) -> None:
    """Apply one AdamW update in place to flat p, m and v of equal size. `low` receives the rounded p.

    m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2, where g is multiplied by grad_scale; p = p (1
    - lr decay) - lr (m / (1 - beta1^step)) / (sqrt(v / (1 - beta2^step)) + eps). decay (n,), float64: weight
    decay of each of the n equally long runs of p. Loshchilov and Hutter, "Decoupled Weight Decay
    Regularization", 2019. Temporary arrays are blocks that fit in cache. No element depends on another, so
    results are bit-identical however the arrays are cut.
    """
    xp = namespace(p)
    root_c2 = math.sqrt(1.0 - power(beta2, step))
    rate = lr / (1.0 - power(beta1, step))
    keep, run = (1.0 - lr * decay).astype(p.dtype), run_length(p, decay)
    for start in range(0, p.size, ADAMW_BLOCK):
        part = slice(start, start + ADAMW_BLOCK)
        d = g[part] * grad_scale
        mb, vb, pb = m[part], v[part], p[part]
        mb *= beta1
        mb += (1.0 - beta1) * d
        vb *= beta2
        d *= d
        d *= 1.0 - beta2
        vb += d
        xp.sqrt(vb, out=d)
        d /= root_c2
        d += eps
        xp.divide(mb, d, out=d)
        d *= rate
        pb *= keep[(start + xp.arange(pb.size)) // run]
        pb -= d
        if low is not None:
            low[part] = pb


@operation("e N, p N", widens=False)
def moving_average(e: Array, p: Array, keep: float) -> None:
    """Replace e by keep e + (1 - keep) p in place; e and p are flat and of equal size.

    As in `adamw`, results are bit-identical however the arrays are cut.
    """
    for start in range(0, p.size, ADAMW_BLOCK):
        part = slice(start, start + ADAMW_BLOCK)
        e[part] *= keep
        e[part] += (1.0 - keep) * p[part]


@operation("g N, chunk; chunk > 0 and N % chunk == 0", widens=False)
def chunk_squares(g: Array, chunk: int) -> Array:
    """Return float64 sums of squares (n,) of g (n * chunk,), one sum for each run of `chunk` elements.

    Each sum depends only on its own run, so it is bit-identical on whichever rank computes it.
    """
    xp = namespace(g)
    sums = xp.empty(g.size // chunk, xp.float64)
    block = max(1, ADAMW_BLOCK // chunk)
    matrix = g.reshape(-1, chunk)
    for start in range(0, len(sums), block):
        wide = matrix[start : start + block].astype(xp.float64)
        wide *= wide
        sums[start : start + block] = wide.sum(axis=1)
    return sums


@operation("raw N uint8, kind, out M real; N == bytes_of(kind, M)", widens=False)
def dequantize(raw: Array, kind: str, out: Array) -> None:
    """Unpack full blocks raw (bytes,) into out (n,); round each element once if `out` has low precision.

    kind: a name in `BLOCK_KINDS`.
    """
    raw, block = np.ascontiguousarray(raw), BLOCK_KINDS[kind]
    with np.errstate(all="ignore"):  # the file reader already rejects values that are not finite
        if kind in PLAIN:
            out[...] = raw.view(PLAIN[kind])
            return
        for start in range(0, out.size, CHUNK):
            chunk = raw[block.bytes_of(start) : block.bytes_of(start + CHUNK)]
            out[start : start + CHUNK] = unpacked(chunk, GGMLQuantizationType[kind])


def column_sums(x: Array) -> Array:
    """Return the sum of x (N, O) over its rows, (O,)."""
    xp, (n, width) = namespace(x), x.shape
    parts = -(-n // (LANES * LANE_ROWS))
    missing = parts * LANES * LANE_ROWS - n
    if missing:  # added zeros do not change a sum
        x = xp.concatenate((x, xp.zeros((missing, width), x.dtype)))
    lanes = x.reshape(parts, LANE_ROWS, LANES, width).sum(axis=1)
    return ((lanes[:, 0] + lanes[:, 1]) + (lanes[:, 2] + lanes[:, 3])).sum(axis=0)
