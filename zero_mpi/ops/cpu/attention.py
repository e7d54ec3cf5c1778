"""Causal attention on CPUs, head by head in blocks of rows, every product by BLAS from inside the kernel.

A block of n queries ends at position m and needs the scores of the first m keys only: what lies above the
diagonal is neither computed nor stored, half of a full mask. Short sequences keep the weights of their
blocks for backward; long ones keep the logarithm of each row's sum and compute the block again, so that
memory grows with T (Dao et al., "FlashAttention", 2022).

Products are float32's. A head of bfloat16 is widened into room that stays in cache, and what is made of it is
rounded from there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zero_mpi.device.arrays import recycled
from zero_mpi.device.types import Array
from zero_mpi.ops.cpu.blas import NN, NT, TN, gemm
from zero_mpi.ops.cpu.jit import (
    EITHER,
    FLOAT,
    INTEGER,
    ONE,
    TRUTH,
    ZERO,
    alike,
    bits,
    exponential,
    f4,
    filled,
    given,
    helper,
    is_low,
    kernel,
    narrow,
    row_most,
    wide,
)
from zero_mpi.ops.low_precision import defined
from zero_mpi.ops.sizes import BLOCK, KEPT_WEIGHTS, gradients_like, head_room, head_weights

UNSEEN = f4(-3e38)  # a score that no exponential is left of; loops over whole blocks have no odd ends

VIEW = given(4, EITHER, layout="A")
RESULT = filled(4, EITHER, layout="A")


@helper
def weights_before(number: int, block: int, before: int) -> int:
    """Elements of a head's weights in earlier blocks; `before`: positions ahead of the first query."""
    return block * (number * before + block * (number * (number + 1) // 2))


@helper
def head_of(x: Array, b: int, h: int, room: Array, fill: bool) -> tuple[int, int]:
    """A head's rows of x as `gemm` takes a matrix: where they lie, or in bfloat16 in room (T, width).

    The room is left as it is unless `fill`.
    """
    if is_low(x):
        length, width = x.shape[1], x.shape[3]
        for t in range(length if fill else 0):
            for j in range(width):
                room[t * width + j] = wide(x[b, t, h, j])
        return room.ctypes.data, max(width, 1)
    return x.ctypes.data + b * x.strides[0] + h * x.strides[2], max(x.strides[1] // 4, x.shape[3], 1)


@helper
def put_back(x: Array, b: int, h: int, room: Array) -> None:
    """Round a head in room to where it belongs; nothing where it lies there."""
    if is_low(x):
        length, width = x.shape[1], x.shape[3]
        for t in range(length):
            for j in range(width):
                x[b, t, h, j] = narrow(x, room[t * width + j])


@helper
def from_row(head: tuple[int, int], r: int) -> tuple[int, int]:
    """The rows of a head from row r on."""
    return head[0] + 4 * r * head[1], head[1]


@helper
def soften(p: Array, n: int, m: int, sums: Array) -> None:
    """Turn n rows of m scores into weights, in place; sums[i] = the logarithm of a row's sum of exponentials.

    The rows are the last n of m positions, each of which sees itself and those before it.
    """
    for i in range(n):
        row = p[i * m : (i + 1) * m]
        seen = m - n + i + 1
        row[seen:] = UNSEEN
        most = row_most(row)
        weight = ZERO
        for j in range(m):
            e = exponential(row[j] - most)
            row[j] = e
            weight += e
        share = ONE / weight
        for j in range(m):
            row[j] *= share
        sums[i] = most + np.log(weight)


@helper
def soften_again(p: Array, n: int, m: int, sums: Array) -> None:
    """`soften` by the sums it gave."""
    for i in range(n):
        row = p[i * m : (i + 1) * m]
        less = sums[i]
        for j in range(m):
            row[j] = exponential(row[j] - less)
        row[m - n + i + 1 :] = ZERO


@helper
def slopes(p: Array, d: Array, n: int, m: int) -> None:
    """Turn the gradient d of n rows of weights p into that of their scores: p (d - sum(p d))."""
    for i in range(n):
        row = p[i * m : (i + 1) * m]
        slope = d[i * m : (i + 1) * m]
        along = ZERO
        for j in range(m):
            along += row[j] * slope[j]
        for j in range(m):
            slope[j] = row[j] * (slope[j] - along)


@helper
def cuts(q: Array, k: Array, v: Array) -> Array:
    """Where in `room` heads of k, v and the result begin, after that of q; then the same once more."""
    queries, keys, width, tall = q.shape[1], k.shape[1], q.shape[3], v.shape[3]
    return np.cumsum(np.array([queries * width, keys * width, keys * tall, queries * tall] * 2))


@helper
def heads_of(given: Any, results: Any, b: int, h: int, at: Array, room: Array) -> Any:
    """The heads of (dy, q, k, v) and of (dq, dk, dv) that query head h has to do with; at: `cuts`."""
    dy, q, k, v = given
    dq, dk, dv = results
    shared = q.shape[2] // k.shape[2]
    g, first = h // shared, h % shared == 0
    dys, qs = head_of(dy, b, h, room[at[2] :], True), head_of(q, b, h, room, True)
    ks, vs = head_of(k, b, g, room[at[0] :], first), head_of(v, b, g, room[at[1] :], first)
    dqs, dks = head_of(dq, b, h, room[at[3] :], False), head_of(dk, b, g, room[at[4] :], False)
    return dys, qs, ks, vs, dqs, dks, head_of(dv, b, g, room[at[5] :], False)


@helper
def put_heads_back(results: Any, b: int, h: int, at: Array, room: Array) -> None:
    """`put_back` of dq, and of dk and dv after the last head that shares them."""
    dq, dk, dv = results
    put_back(dq, b, h, room[at[3] :])
    shared = dq.shape[2] // dk.shape[2]
    if h % shared == shared - 1:
        put_back(dk, b, h // shared, room[at[4] :])
        put_back(dv, b, h // shared, room[at[5] :])


@kernel(VIEW, VIEW, VIEW, FLOAT, INTEGER, TRUTH, RESULT, *[filled(1)] * 3)
def forward(
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    block: int,
    keep: bool,
    y: Array,
    p: Array,
    sums: Array,
    room: Array,
) -> None:
    """y of `causal_attention`, and `sums` (B H T,) of its rows; p holds all weights if `keep`, else some.

    room: `head_room` elements for heads of bfloat16.
    """
    batch, length, heads, width = q.shape
    before, shared, tall = k.shape[1] - length, heads // k.shape[2], v.shape[3]
    at, end = cuts(q, k, v), 0
    for b in range(batch):
        for h in range(heads):
            g, first = h // shared, h % shared == 0
            qs, ys = head_of(q, b, h, room, True), head_of(y, b, h, room[at[2] :], False)
            ks, vs = head_of(k, b, g, room[at[0] :], first), head_of(v, b, g, room[at[1] :], first)
            for r in range(0, length, block):
                n = min(block, length - r)
                m = before + r + n
                start = end if keep else 0
                end = start + n * m
                weights = p[start:end]
                matrix = (weights.ctypes.data, m)
                row = (b * heads + h) * length + r
                gemm(NT, (n, m, width), scale, from_row(qs, r), ks, ZERO, matrix)
                soften(weights, n, m, sums[row : row + n])
                gemm(NN, (n, tall, m), ONE, matrix, vs, ZERO, from_row(ys, r))
            put_back(y, b, h, room[at[2] :])


@kernel(*[VIEW] * 4, FLOAT, INTEGER, TRUTH, filled(1), given(1), *[filled(1)] * 2, *[RESULT] * 3)
def backward(
    dy: Array,
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    block: int,
    keep: bool,
    p: Array,
    sums: Array,
    d: Array,
    room: Array,
    dq: Array,
    dk: Array,
    dv: Array,
) -> None:
    """Gradients of `forward`; d is room for a block, `room` for twice the heads of bfloat16.

    From the last block of a head down: that one sees all keys, so it writes what the others, and then the
    heads that share them, add to.
    """
    batch, length, heads, width = q.shape
    before, shared, tall = k.shape[1] - length, heads // k.shape[2], v.shape[3]
    at, blocks = cuts(q, k, v), -(-length // block)
    of_head = weights_before(blocks - 1, block, before) + (length - (blocks - 1) * block) * k.shape[1]
    for b in range(batch):
        for h in range(heads):
            dys, qs, ks, vs, dqs, dks, dvs = heads_of((dy, q, k, v), (dq, dk, dv), b, h, at, room)
            for number in range(blocks - 1, -1, -1):
                r, n = number * block, min(block, length - number * block)
                m = before + r + n
                start = (b * heads + h) * of_head + weights_before(number, block, before) if keep else 0
                weights = p[start : start + n * m]
                matrix, slope = (weights.ctypes.data, m), (d.ctypes.data, m)
                beta = ZERO if number == blocks - 1 and h % shared == 0 else ONE
                if not keep:
                    gemm(NT, (n, m, width), scale, from_row(qs, r), ks, ZERO, matrix)
                    soften_again(weights, n, m, sums[(b * heads + h) * length + r :])
                gemm(TN, (m, tall, n), ONE, matrix, from_row(dys, r), beta, dvs)
                gemm(NT, (n, m, tall), ONE, from_row(dys, r), vs, ZERO, slope)
                slopes(weights, d, n, m)
                gemm(NN, (n, width, m), scale, slope, ks, ZERO, from_row(dqs, r))
                gemm(TN, (m, width, n), scale, slope, from_row(qs, r), beta, dks)
            put_heads_back((dq, dk, dv), b, h, at, room)


def rowwise(x: Array) -> Array:
    """x (B, T, heads, width), or a copy, by bits, whose heads' rows are contiguous and do not overlap."""
    (down, right), size = (x.strides[1], x.strides[3]), x.itemsize
    is_fine = right == size and down % size == 0 and down >= size * x.shape[3]
    return bits(x if is_fine else np.ascontiguousarray(x))


def causal_attention(q: Array, k: Array, v: Array, scale: float) -> tuple[Array, Any]:
    """`reference.causal_attention`, which keeps (weights or room for a block, logarithms of sums)."""
    if not alike(q, k, v) or not q.size or not v.size:
        found: tuple[Array, Any] = defined.causal_attention(q, k, v, scale)
        return found
    batch, length, heads, _ = q.shape
    size = head_weights(length, k.shape[1])
    keep = size <= KEPT_WEIGHTS
    y = recycled((batch, length, heads, v.shape[3]), q.dtype)
    p = recycled((batch * heads * size if keep else BLOCK * k.shape[1],))
    sums = recycled((batch * heads * length,))
    room = recycled((head_room(q, k, v),))
    views = rowwise(q), rowwise(k), rowwise(v)
    forward(*views, f4(scale), BLOCK, keep, bits(y), p, sums, room)
    return y, (p if keep else None, sums)


def causal_attention_backward(
    dy: Array, q: Array, k: Array, v: Array, kept: Any, scale: float
) -> tuple[Array, Array, Array]:
    """`reference.causal_attention_backward`."""
    if not isinstance(kept, tuple):
        found: tuple[Array, Array, Array] = defined.causal_attention_backward(dy, q, k, v, kept, scale)
        return found
    weights, sums = kept
    keep = head_weights(q.shape[1], k.shape[1]) <= KEPT_WEIGHTS
    d, room = recycled((BLOCK * k.shape[1],)), recycled((2 * head_room(q, k, v),))
    p = recycled((BLOCK * k.shape[1],)) if weights is None else weights
    results = gradients_like(q, k, v, recycled)
    views = rowwise(dy), rowwise(q), rowwise(k), rowwise(v)
    backward(*views, f4(scale), BLOCK, keep, p, sums, d, room, *map(bits, results))
    return results
