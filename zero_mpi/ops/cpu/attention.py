"""Causal attention on CPUs in tiles: blocks of queries times blocks of keys; BLAS computes every product.

A tile has rows of all query heads that share a key head, so that one product computes all of them. Short
sequences keep the exponentials of their tiles for backward. Long sequences keep two numbers per row, and
backward computes the tiles again, so that memory is linear in T (Dao et al., "FlashAttention", 2022).
`attention_bf16` computes bfloat16.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from zero_mpi.device.arrays import recycled
from zero_mpi.device.types import Array
from zero_mpi.ops import reference, threads
from zero_mpi.ops.cpu import attention_bf16
from zero_mpi.ops.cpu.attention_parts import HeadShare, rowwise, units
from zero_mpi.ops.cpu.blas import NN, NT, TN, gemm
from zero_mpi.ops.cpu.jit import ONE, UNSEEN, ZERO, exponential, f4, floats, helper, kernel, row_most, single
from zero_mpi.ops.cpu.products import otherwise, product_of
from zero_mpi.ops.registry import implements
from zero_mpi.ops.sizes import (
    BLOCK,
    KEPT_WEIGHTS,
    LOW_BLOCK,
    attention_tile,
    check_kept,
    early_keys,
    gradients_like,
    head_weights,
)


@helper
def at(x: Array, b: int, t: int, h: int) -> tuple[int, int]:
    """Return a head's rows from x[b, t, h] on for `gemm`: (address, elements from one row to the next)."""
    address = x.ctypes.data + b * x.strides[0] + t * x.strides[1] + h * x.strides[2]
    return address, max(x.strides[1] // 4, x.shape[3], 1)


@helper
def stacked(x: Array) -> tuple[int, int]:
    """Return all rows of x (heads, n, width), contiguous, as one matrix for `gemm`."""
    return x.ctypes.data, x.shape[2]


@helper
def part(buffer: Array, start: int, heads: int, n: int, width: int) -> Array:
    return buffer[start : start + heads * n * width].reshape(heads, n, width)


@helper
def line(x: Array, b: int, t: int, h: int) -> Array:
    """Return the row x[b, t, h] as a contiguous array, so that loops over it become vector code."""
    return floats(at(x, b, t, h)[0], x.shape[3])


@helper
def collect(x: Array, b: int, r: int, h: int, out: Array) -> None:
    """Copy rows of x (B, T, heads, width), from x[b, r, h] on, to `out` (heads, n, width)."""
    for s, i in np.ndindex(out.shape[:2]):
        row = line(x, b, r + i, h + s)
        for j in range(row.size):
            out[s, i, j] = row[j]


@helper
def soften(p: Array, y: Array, sums: Array, begins: Array, c: int, offset: int) -> None:
    """Turn scores p (heads, n, m) into exponentials, relative to the largest score of the row so far.

    Row i sees the keys from begins[i] to its own position. The tile begins at key c, and row 0 is `offset`
    positions later. sums[i, s] holds the row's largest score and sum of exponentials so far. If this tile
    has a larger score, the row's sum and y are scaled down. Before the first tile, sums and y are undefined.
    """
    starts = c == begins[0]
    for s, i in np.ndindex(p.shape[:2]):
        row = p[s, i]
        row[: max(begins[i] - c, 0)] = UNSEEN
        row[max(offset + i + 1, 0) :] = UNSEEN
        most = row_most(row)
        if not starts:
            most = max(most, sums[i, s, 0])
        weight = ZERO
        for j in range(row.size):
            e = exponential(row[j] - most)
            row[j] = e
            weight += e
        if not starts:
            factor = exponential(sums[i, s, 0] - most)
            weight += sums[i, s, 1] * factor
            for j in range(y.shape[2]):
                y[s, i, j] *= factor
        sums[i, s, 0], sums[i, s, 1] = most, weight


@helper
def settle(z: Array, sums: Array, y: Array, b: int, r: int, h: int) -> None:
    """Write z (heads, n, width) / sum to rows of y (B, T, heads, width); replace each sum by 1 / sum."""
    for s, i in np.ndindex(z.shape[:2]):
        share, row = ONE / sums[i, s, 1], line(y, b, r + i, h + s)
        sums[i, s, 1] = share
        for j in range(row.size):
            row[j] = z[s, i, j] * share


@kernel("f4~ f4~+ f4~+ f4~ f4~ i2~ f i1 f1+ f1+")
def forward(
    q: Array,
    y: Array,
    sums: Array,
    k: Array,
    v: Array,
    begins: Array,
    scale: float,
    form: Array,
    p: Array,
    scratch: Array,
) -> None:
    """Fill y of `causal_attention`, and sums (B, T, H, 2): the largest score of a row, and 1 / its sum.

    form: maximum numbers of rows of a head and of keys in a tile; 1 if p stores all exponentials, else 0
    """
    batch, length, heads, width = q.shape
    offset, shared, tall = k.shape[1] - length, heads // k.shape[2], v.shape[3]
    (block, keys, keep), start = (form[0], form[1], form[2]), 0
    for b, g in np.ndindex((batch, k.shape[2])):
        for r in range(0, length, block):
            n, h, first = min(block, length - r), g * shared, begins[b, r]
            lines, rows = shared * n, sums[b, r : r + n, h : h + shared]
            x, z = part(scratch, 0, shared, n, width), part(scratch, lines * width, shared, n, tall)
            collect(q, b, r, h, x)
            for c in range(first, offset + r + n, keys):
                m, beta = min(keys, offset + r + n - c), ZERO if c == first else ONE
                tile = part(p, start, shared, n, m)
                gemm(NT, (lines, m, width), scale, stacked(x), at(k, b, c, g), ZERO, stacked(tile))
                soften(tile, z, rows, begins[b, r:], c, offset + r - c)
                gemm(NN, (lines, tall, m), ONE, stacked(tile), at(v, b, c, g), beta, stacked(z))
                start += keep * tile.size
            settle(z, rows, y, b, r, h)


@helper
def scaled(dy: Array, y: Array, b: int, r: int, h: int, sums: Array, out: Array, dots: Array) -> None:
    """Copy rows of dy / sum to `out`, like `collect`; write the dot products of `out` and y to `dots`."""
    for s, i in np.ndindex(out.shape[:2]):
        total, share = ZERO, sums[i, s, 1]
        slope, row = line(dy, b, r + i, h + s), line(y, b, r + i, h + s)
        for j in range(row.size):
            d = slope[j] * share
            out[s, i, j] = d
            total += d * row[j]
        dots[s, i, 0] = total


@helper
def slopes(
    p: Array, d: Array, dots: Array, sums: Array, begins: Array, c: int, offset: int, keep: int
) -> None:
    """Turn the gradient d of the weights into the gradient of their scores: p (d - dots).

    If not `keep`, p holds scores, which become exponentials again, relative to the largest score of the row.
    """
    for s, i in np.ndindex(p.shape[:2]):
        row, slope, most, dot = p[s, i], d[s, i], sums[i, s, 0], dots[s, i, 0]
        if not keep:
            for j in range(row.size):
                row[j] = exponential(row[j] - most)
            row[: max(begins[i] - c, 0)] = ZERO
            row[max(offset + i + 1, 0) :] = ZERO
        for j in range(row.size):
            slope[j] = row[j] * (slope[j] - dot)


@kernel("f4~ f4~ f4~ f4~ f4~+ f4~ f4~ f4~+ f4~+ i2~ f i1 f1+ f1+")
def backward(
    q: Array,
    y: Array,
    sums: Array,
    dy: Array,
    dq: Array,
    k: Array,
    v: Array,
    dk: Array,
    dv: Array,
    begins: Array,
    scale: float,
    form: Array,
    p: Array,
    scratch: Array,
) -> None:
    """Compute the gradients of `forward`: fill dq, and add to dk and dv."""
    (batch, length, heads, width), tall = q.shape, v.shape[3]
    offset, shared = k.shape[1] - length, heads // k.shape[2]
    (block, keys, keep), start = (form[0], form[1], form[2]), 0
    for b, g in np.ndindex((batch, k.shape[2])):
        for r in range(0, length, block):
            n, h, first = min(block, length - r), g * shared, begins[b, r]
            lines, rows = shared * n, sums[b, r : r + n, h : h + shared]
            x, dx, dz, dots, free = buffers(scratch, shared, n, width, tall)
            collect(q, b, r, h, x)
            scaled(dy, y, b, r, h, rows, dz, dots)
            for c in range(first, offset + r + n, keys):
                m, beta = min(keys, offset + r + n - c), ZERO if c == first else ONE
                tile, d = part(p, start, shared, n, m), part(free, 0, shared, n, m)
                if not keep:
                    gemm(NT, (lines, m, width), scale, stacked(x), at(k, b, c, g), ZERO, stacked(tile))
                gemm(NT, (lines, m, tall), ONE, stacked(dz), at(v, b, c, g), ZERO, stacked(d))
                slopes(tile, d, dots, rows, begins[b, r:], c, offset + r - c, keep)
                gemm(TN, (m, tall, lines), ONE, stacked(tile), stacked(dz), ONE, at(dv, b, c, g))
                gemm(NN, (lines, width, m), scale, stacked(d), at(k, b, c, g), beta, stacked(dx))
                gemm(TN, (m, width, lines), scale, stacked(d), stacked(x), ONE, at(dk, b, c, g))
                start += keep * tile.size
            for s, i in np.ndindex((shared, n)):
                line(dq, b, r + i, h + s)[:] = dx[s, i]


@helper
def buffers(scratch: Array, heads: int, n: int, width: int, tall: int) -> tuple[Array, ...]:
    """Return views of `scratch` for rows of q, dq and dy and for one number per row, and the unused rest."""
    dx, dz, column = heads * n * width, 2 * heads * n * width, heads * n * (2 * width + tall)
    first = part(scratch, 0, heads, n, width), part(scratch, dx, heads, n, width)
    rest = part(scratch, dz, heads, n, tall), part(scratch, column, heads, n, 1)
    return *first, *rest, scratch[column + heads * n :]


@implements(reference.causal_attention)
def causal_attention(
    q: Array, k: Array, v: Array, scale: float, begins: Array | None = None
) -> tuple[Array, Any]:
    """Compute `reference.causal_attention`; float32 keeps (exponentials or None, sums, y, begins)."""
    multiplies = product_of(q, k, v)
    if multiplies is None or not q.size or not v.size:
        return otherwise(causal_attention, q, k, v, scale, begins)
    if not single(q):
        return attention_bf16.forward(multiplies, q, k, v, scale, begins)
    (batch, length, heads, _), size = q.shape, head_weights(q.shape[1], k.shape[1])
    y, sums = recycled((batch, length, heads, v.shape[3])), recycled((batch, length, heads, 2))
    p = recycled((batch * heads * size,)) if size <= KEPT_WEIGHTS else None
    of_keys = rowwise(k), rowwise(v)
    in_tiles(forward, (rowwise(q), y, sums), of_keys, of_keys, begins, scale, p)
    return y, (p, sums, y, begins)


@implements(reference.causal_attention_backward)
def causal_attention_backward(
    dy: Array, q: Array, k: Array, v: Array, saved: Any, scale: float
) -> tuple[Array, Array, Array]:
    multiplies = product_of(dy, q, k, v)
    if multiplies is None or not isinstance(saved, tuple):
        return otherwise(causal_attention_backward, dy, q, k, v, saved, scale)
    (p, sums, *y, begins), (batch, length, heads, _), total = saved, q.shape, k.shape[1]
    size, count = head_weights(length, total, BLOCK if y else LOW_BLOCK), batch * heads * length
    check_kept((p, batch * heads * size), (begins, batch * length), (sums, count * (2 if y else 1)))
    if not single(q):
        return attention_bf16.backward(multiplies, dy, q, k, v, saved, scale)
    check_kept((y[0], dy.size))
    dq, dk, dv = gradients_like(q, k, v, recycled)
    early = [recycled((batch, n, *x.shape[2:])) for x in (k, v) if (n := early_keys(length, total))]
    for x in (dk, dv, *early):
        x.fill(0)
    of_rows, of_keys = (rowwise(q), *y, sums, rowwise(dy), dq), (rowwise(k), rowwise(v))
    in_tiles(backward, of_rows, (*of_keys, dk, dv), (*of_keys, *early), begins, scale, p)
    for x, term in zip((dk, dv), early, strict=False):
        x[:, : term.shape[1]] += term
    return dq, dk, dv


def in_tiles(
    run: Callable[..., None],
    of_rows: Sequence[Array],
    of_keys: Sequence[Array],
    early: Sequence[Array],
    begins: Array | None,
    scale: float,
    p: Array | None,
) -> None:
    """Run a kernel on all shares: with `early` for early rows, else `of_keys`. p: exponentials or None."""
    (batch, length, *_), total = of_rows[0].shape, of_keys[0].shape[1]
    parts, size, keep = units(of_rows[0], of_keys[0]), head_weights(length, total), p is not None
    block, keys, scores, extra = attention_tile(of_rows[0], of_keys[0], of_keys[1], keep)
    buffer = recycled((len(parts) * scores,)) if p is None else p
    scratch, form = recycled((len(parts), scores + extra)), np.array((block, keys, keep))
    first = np.zeros((batch, length), np.int64) if begins is None else begins

    def work(number: int, shares: list[HeadShare]) -> None:
        for share in shares:
            key_views = share.keys_seen(total - length, *(early if share.rows.stop < length else of_keys))
            views = *share.queries(*of_rows), *key_views, first[share.sequences, share.rows]
            tiles = buffer[share.heads_before * size if keep else number * scores :]
            run(*views, f4(scale), form, tiles, scratch[number])

    threads.run([partial(work, number, shares) for number, shares in enumerate(parts)])
