"""Causal attention on CPUs. Heads are computed one by one, in blocks of rows; BLAS multiplies.

A block of n queries that ends at position m needs the scores of only the first m keys. Scores above the
diagonal, half of a full mask, are neither computed nor stored. Short sequences keep their weights for
backward. Long sequences keep only the logarithm of each row's sum and compute each block again, so memory
grows with T (Dao et al., "FlashAttention", 2022). `attention_bf16` does the same in bfloat16.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from zero_mpi.device.arrays import recycled
from zero_mpi.device.types import Array
from zero_mpi.ops import reference, threads
from zero_mpi.ops.cpu import attention_bf16
from zero_mpi.ops.cpu.attention_parts import HeadShare, shares
from zero_mpi.ops.cpu.blas import NN, NT, TN, gemm
from zero_mpi.ops.cpu.jit import (
    ONE,
    UNSEEN,
    ZERO,
    exponential,
    f4,
    helper,
    kernel,
    log_single,
    row_most,
    single,
)
from zero_mpi.ops.cpu.products import otherwise, product_of
from zero_mpi.ops.registry import implements
from zero_mpi.ops.sizes import BLOCK, KEPT_WEIGHTS, LOW_BLOCK, check_kept, gradients_like, head_weights


@helper
def weights_before(number: int, block: int, before: int) -> int:
    """Return the number of a head's weights in earlier blocks; `before`: positions ahead of query 0."""
    return block * (number * before + block * (number * (number + 1) // 2))


@helper
def at(x: Array, b: int, t: int, h: int) -> tuple[int, int]:
    """Return the rows of a head of x from x[b, t, h] on, as (address, elements between rows) for `gemm`."""
    address = x.ctypes.data + b * x.strides[0] + t * x.strides[1] + h * x.strides[2]
    return address, max(x.strides[1] // 4, x.shape[3], 1)


@helper
def first_seen(begins: Array, row: int) -> int:
    """Return the first key that a block sees: the first key of its first row, as `begins` never falls."""
    return begins[row] if begins.size else 0


@helper
def hide(row: Array, begins: Array, i: int, value: float) -> None:
    """Set row i to `value` at all keys that row i does not see but the first row of its block sees."""
    if begins.size:
        row[: begins[i] - begins[0]] = value


@helper
def soften(p: Array, n: int, m: int, sums: Array, begins: Array) -> None:
    """Turn n rows of m scores into weights in place; sums[i]: the logarithm of row i's sum of exponentials.

    The rows are the last n of m positions. Row i sees the keys from begins[i] up to its own position, where
    begins[0] is the first of the m keys; a row sees all earlier keys if `begins` is empty.
    """
    for i in range(n):
        row = p[i * m : (i + 1) * m]
        seen = m - n + i + 1
        row[seen:] = UNSEEN
        hide(row, begins, i, UNSEEN)
        most = row_most(row)
        weight = ZERO
        for j in range(m):
            e = exponential(row[j] - most)
            row[j] = e
            weight += e
        share = ONE / weight
        for j in range(m):
            row[j] *= share
        sums[i] = most + log_single(weight)


@helper
def soften_again(p: Array, n: int, m: int, sums: Array, begins: Array) -> None:
    """Turn scores into the same weights as `soften`, given the sums that it returned."""
    for i in range(n):
        row = p[i * m : (i + 1) * m]
        less = sums[i]
        for j in range(m):
            row[j] = exponential(row[j] - less)
        row[m - n + i + 1 :] = ZERO
        hide(row, begins, i, ZERO)


@helper
def slopes(p: Array, d: Array, n: int, m: int) -> None:
    """Turn the gradient d of n rows of weights p into the gradient of their scores: p (d - sum(p d))."""
    for i in range(n):
        row = p[i * m : (i + 1) * m]
        slope = d[i * m : (i + 1) * m]
        along = ZERO
        for j in range(m):
            along += row[j] * slope[j]
        for j in range(m):
            slope[j] = row[j] * (slope[j] - along)


@kernel("f4~ f4~ f4~ i1 f i b f4~+ f1+ f1+")
def forward(
    q: Array,
    k: Array,
    v: Array,
    begins: Array,
    scale: float,
    block: int,
    keep: bool,
    y: Array,
    p: Array,
    sums: Array,
) -> None:
    """Fill y of `causal_attention` and row sums (B H T,). p holds all weights if `keep`, else one block's."""
    batch, length, heads, width = q.shape
    before, shared, tall = k.shape[1] - length, heads // k.shape[2], v.shape[3]
    end = 0
    for b in range(batch):
        for h in range(heads):
            g = h // shared
            for r in range(0, length, block):
                n, first = min(block, length - r), first_seen(begins, b * length + r)
                m = before + r + n - first
                start = end if keep else 0
                end = start + n * (m + first)
                weights = p[start : start + n * m]
                matrix = (weights.ctypes.data, m)
                row, seen = (b * heads + h) * length + r, begins[b * length + r :]
                gemm(NT, (n, m, width), scale, at(q, b, r, h), at(k, b, first, g), ZERO, matrix)
                soften(weights, n, m, sums[row : row + n], seen)
                gemm(NN, (n, tall, m), ONE, matrix, at(v, b, first, g), ZERO, at(y, b, r, h))


@kernel("f4~ f4~ f4~ f4~ i1 f i b f1+ f1 f1+ f4~+ f4~+ f4~+")
def backward(
    dy: Array,
    q: Array,
    k: Array,
    v: Array,
    begins: Array,
    scale: float,
    block: int,
    keep: bool,
    p: Array,
    sums: Array,
    d: Array,
    dq: Array,
    dk: Array,
    dv: Array,
) -> None:
    """Fill the gradients dq, dk and dv of `forward`; d is scratch space for a block.

    A head's last block comes first: it sees all keys, so it writes the gradients to which the other blocks
    add. With `begins` it adds to zeros. Heads that share keys add their gradients in head order.
    """
    batch, length, heads, width = q.shape
    before, shared, tall = k.shape[1] - length, heads // k.shape[2], v.shape[3]
    last = (length - 1) // block * block
    of_head = weights_before(last // block, block, before) + (length - last) * k.shape[1]
    for b in range(batch):
        for h in range(heads):
            g = h // shared
            for r in range(last, -1, -block):
                n, first = min(block, length - r), first_seen(begins, b * length + r)
                m = before + r + n - first
                row, seen = (b * heads + h) * length + r, begins[b * length + r :]
                start = (b * heads + h) * of_head + weights_before(r // block, block, before) if keep else 0
                weights = p[start : start + n * m]
                matrix, slope = (weights.ctypes.data, m), (d.ctypes.data, m)
                beta = ZERO if r == last and h % shared == 0 and begins.size == 0 else ONE
                if not keep:
                    gemm(NT, (n, m, width), scale, at(q, b, r, h), at(k, b, first, g), ZERO, matrix)
                    soften_again(weights, n, m, sums[row : row + n], seen)
                gemm(TN, (m, tall, n), ONE, matrix, at(dy, b, r, h), beta, at(dv, b, first, g))
                gemm(NT, (n, m, tall), ONE, at(dy, b, r, h), at(v, b, first, g), ZERO, slope)
                slopes(weights, d, n, m)
                gemm(NN, (n, width, m), scale, slope, at(k, b, first, g), ZERO, at(dq, b, r, h))
                gemm(TN, (m, width, n), scale, slope, at(q, b, r, h), beta, at(dk, b, first, g))


def rowwise(x: Array) -> Array:
    """Return x (B, T, heads, width), or a copy of it, with contiguous rows that do not overlap."""
    down, right = x.strides[1], x.strides[3]
    return x if right == 4 and down % 4 == 0 and down >= 4 * x.shape[3] else np.ascontiguousarray(x)


@implements(reference.causal_attention)
def causal_attention(
    q: Array, k: Array, v: Array, scale: float, begins: Array | None = None
) -> tuple[Array, Any]:
    """Compute `reference.causal_attention`, and keep (weights or None, logarithms of sums, begins)."""
    multiplies = product_of(q, k, v)
    if multiplies is None or not q.size or not v.size:
        found: tuple[Array, Any] = otherwise(causal_attention, q, k, v, scale, begins)
        return found
    if not single(q):
        return attention_bf16.forward(multiplies, q, k, v, scale, begins)
    (batch, length, heads, _), total = q.shape, k.shape[1]
    size, parts = head_weights(length, total), shares(q, k)
    keep = size <= KEPT_WEIGHTS
    y = recycled((batch, length, heads, v.shape[3]))
    p = recycled((batch * heads * size if keep else len(parts) * BLOCK * total,))
    sums = recycled((batch * heads * length,))
    views, step = (rowwise(q), rowwise(k), rowwise(v)), f4(scale)

    def work(share: HeadShare) -> None:
        buffer = p[share.before * size if keep else share.number * BLOCK * total :]
        of_rows = sums[share.before * length :]
        (qs, ks, vs), (ys,) = share.cut(*views), share.cut(y)
        forward(qs, ks, vs, share.begins(begins), step, BLOCK, keep, ys, buffer, of_rows)

    threads.run([partial(work, share) for share in parts])
    return y, (p if keep else None, sums, begins)


@implements(reference.causal_attention_backward)
def causal_attention_backward(
    dy: Array, q: Array, k: Array, v: Array, kept: Any, scale: float
) -> tuple[Array, Array, Array]:
    multiplies = product_of(dy, q, k, v)
    if multiplies is None or not isinstance(kept, tuple):
        found: tuple[Array, Array, Array] = otherwise(causal_attention_backward, dy, q, k, v, kept, scale)
        return found
    (weights, sums, begins), (batch, length, heads, _), total = kept, q.shape, k.shape[1]
    size = head_weights(length, total, BLOCK if single(q) else LOW_BLOCK)
    check_kept((weights, batch * heads * size), (sums, batch * heads * length), (begins, batch * length))
    if not single(q):
        return attention_bf16.backward(multiplies, dy, q, k, v, kept, scale)
    parts, block, keep = shares(q, k), BLOCK * total, weights is not None
    d = recycled((len(parts) * block,))
    p = weights if keep else recycled((len(parts) * block,))
    results = gradients_like(q, k, v, recycled)
    for result in results[1:] if begins is not None else ():
        result.fill(0)
    views, step = (rowwise(dy), rowwise(q), rowwise(k), rowwise(v)), f4(scale)

    def work(share: HeadShare) -> None:
        buffer = p[share.before * size if keep else share.number * block :]
        of_rows, slope = sums[share.before * length :], d[share.number * block :]
        dys, qs, ks, vs = share.cut(*views)
        found = share.begins(begins)
        backward(dys, qs, ks, vs, found, step, BLOCK, keep, buffer, of_rows, slope, *share.cut(*results))

    threads.run([partial(work, share) for share in parts])
    return results
