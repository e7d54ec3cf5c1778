"""Causal attention in bfloat16 on CPUs, in blocks of rows of many heads; oneDNN computes the products.

Blocks are as in `ops.cpu.attention`, but several heads are computed together, because a call of the library
takes ten microseconds to start. Scores and all sums are float32. Weights and the gradients of scores are
rounded to bfloat16 for their products, as in GPU kernels.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np

from zero_mpi.device.arrays import recycled
from zero_mpi.device.types import Array
from zero_mpi.ops import threads
from zero_mpi.ops.cpu.attention_parts import HeadShare, Tile, rowwise, shares, tiles_for
from zero_mpi.ops.cpu.jit import (
    BFLOAT16,
    ONE,
    UNSEEN,
    ZERO,
    bits,
    exponential,
    f4,
    kernel,
    log_single,
    narrow,
    row_most,
    wide,
)
from zero_mpi.ops.sizes import KEPT_WEIGHTS, LOW_BLOCK, gradients_like, head_weights, low_tile

Multiply = Callable[..., Array]
EVEN = 16  # rows end at a multiple of EVEN past the diagonal, so that loops run over full vectors


@kernel("f4 i2 f b f3+ l4+")
def soften(s: Array, hidden: Array, scale: float, again: bool, sums: Array, p: Array) -> None:
    """Compute the weights p, the causal softmax of s (B, H, n, m) times scale, for the last n of m positions.

    sums (B, H, n): the logarithm of each row's sum of exponentials; an input if `again`. hidden (B, n): the
    number of first keys that a row does not see; if it is empty, rows see all keys up to their position.
    """
    batch, heads, n, m = s.shape
    row = np.empty(m + EVEN, np.float32)
    for b in range(batch):
        for h in range(heads):
            for i in range(n):
                stop = m - n + i + 1
                end = min(m, (stop + EVEN - 1) // EVEN * EVEN)
                scores, weights = s[b, h, i], p[b, h, i]
                for j in range(end):
                    row[j] = scores[j] * scale
                row[stop:end] = UNSEEN
                if hidden.size:
                    row[: hidden[b, i]] = UNSEEN
                if again:
                    log_sum, share = sums[b, h, i], ONE
                    for j in range(end):
                        row[j] = exponential(row[j] - log_sum)
                else:
                    most, weight = row_most(row[:end]), ZERO
                    for j in range(end):
                        e = exponential(row[j] - most)
                        row[j] = e
                        weight += e
                    share = ONE / weight
                    sums[b, h, i] = most + log_single(weight)
                for j in range(end):
                    weights[j] = narrow(weights, row[j] * share)
                weights[end:] = 0


@kernel("l4 f4 f l4+")
def slopes(p: Array, dp: Array, scale: float, ds: Array) -> None:
    """Compute the gradient of scores ds = p (dp - sum(p dp)) scale, from p (B, H, n, m) and its gradient."""
    batch, heads, n, m = p.shape
    for b in range(batch):
        for h in range(heads):
            for i in range(n):
                end = min(m, (m - n + i + EVEN) // EVEN * EVEN)
                weights, slope, out = p[b, h, i], dp[b, h, i], ds[b, h, i]
                dot = ZERO
                for j in range(end):
                    dot += wide(weights[j]) * slope[j]
                for j in range(end):
                    out[j] = narrow(out, wide(weights[j]) * (slope[j] - dot) * scale)
                out[end:] = 0


@kernel("f1 l1+")
def lower(x: Array, out: Array) -> None:
    """Round x to bfloat16, element by element."""
    for i in range(x.size):
        out[i] = narrow(out, x[i])


def forward(
    multiplies: Multiply, q: Array, k: Array, v: Array, scale: float, begins: Array | None
) -> tuple[Array, Any]:
    """Return y of `reference.causal_attention`, and (weights or None, logarithms of sums, begins)."""
    batch, length, heads, _ = q.shape
    parts, views = shares(q, k), (rowwise(q), rowwise(k), rowwise(v))
    most = largest(parts, q, k)
    y = recycled((batch, length, heads, v.shape[3]), q.dtype)
    size = head_weights(length, k.shape[1], LOW_BLOCK)
    keep = size <= KEPT_WEIGHTS
    p = recycled((batch * heads * size if keep else len(parts) * most,), BFLOAT16)
    sums, s = recycled((batch * heads * length,)), recycled((len(parts) * most,))

    def work(share: HeadShare) -> None:
        (qs, ks, vs), (ys,) = share.cut(*views), share.cut(y)
        start, of_rows = share.number * most, sums[share.heads_before * length :]
        firsts = None if begins is None else begins[share.sequences]
        for full in tiles_for(qs, ks):
            tile = full.within(firsts)
            scores = tile.cut(s, start)
            weights = tile.cut(p, share.heads_before * size + tile.weights if keep else start)
            multiplies(tile.of_queries(qs), tile.of_keys(ks).swapaxes(2, 3), scores)
            soften(scores, tile.hidden(firsts), f4(scale), False, tile.cut_sums(of_rows), bits(weights))
            multiplies(weights, tile.of_keys(vs), tile.of_queries(ys))

    threads.run([partial(work, share) for share in parts])
    return y, (p if keep else None, sums, begins)


def largest(parts: list[HeadShare], q: Array, k: Array) -> int:
    """Return the number of scores in the largest tile of all shares."""
    lengths = q.shape[1], k.shape[1]
    return max(low_tile(x.shape[0], x.shape[2], *lengths) for share in parts for x in share.cut(k))


def backward(
    multiplies: Multiply, dy: Array, q: Array, k: Array, v: Array, saved: Any, scale: float
) -> tuple[Array, Array, Array]:
    """Return (dq, dk, dv) of `forward`."""
    (p, sums, begins), parts = saved, shares(q, k)
    size, most = head_weights(q.shape[1], k.shape[1], LOW_BLOCK), largest(parts, q, k)
    s, slope = recycled((len(parts) * most,)), recycled((len(parts) * most,), BFLOAT16)
    scratch = None if p is not None else recycled((len(parts) * most,), BFLOAT16)
    results = gradients_like(q, k, v, recycled)
    views = rowwise(dy), rowwise(q), rowwise(k), rowwise(v)

    def work(share: HeadShare) -> None:
        (dys, qs, ks, vs), (dq, dk, dv) = share.cut(*views), share.cut(*results)
        start, of_rows = share.number * most, sums[share.heads_before * q.shape[1] :]
        firsts = None if begins is None else begins[share.sequences]
        tiles = tuple(tile.within(firsts) for tile in tiles_for(qs, ks))
        to_keys, to_values = KeySums(dk, tiles), KeySums(dv, tiles)
        for tile in tiles:
            scores, ds, dy_rows = tile.cut(s, start), tile.cut(slope, start), tile.of_queries(dys)
            if scratch is None:
                weights = tile.cut(p, share.heads_before * size + tile.weights)
            else:
                weights = tile.cut(scratch, start)
                multiplies(tile.of_queries(qs), tile.of_keys(ks).swapaxes(2, 3), scores)
                soften(scores, tile.hidden(firsts), f4(scale), True, tile.cut_sums(of_rows), bits(weights))
            to_values.add(multiplies, tile, weights, dy_rows)
            multiplies(dy_rows, tile.of_keys(vs).swapaxes(2, 3), scores)
            slopes(bits(weights), scores, f4(scale), bits(ds))
            multiplies(ds, tile.of_keys(ks), tile.of_queries(dq))
            to_keys.add(multiplies, tile, ds, tile.of_queries(qs))

    threads.run([partial(work, share) for share in parts])
    return results


class KeySums:
    """Gradient of keys or values (B, S, G, width), summed in float32 if several tiles add to it."""

    def __init__(self, result: Array, tiles: tuple[Tile, ...]) -> None:
        self._result, self._sums = result, None
        if not all(tile.is_first and tile.is_last for tile in tiles):
            sequences, heads = tiles[0].shape[:2]
            self._shape = sequences, heads, result.shape[1], result.shape[3]
            size = prod(self._shape)
            self._sums, self._rounded_sums = recycled((size,)), recycled((size,), BFLOAT16)

    def add(self, multiplies: Multiply, tile: Tile, weights: Array, x: Array) -> None:
        """Add weights^T x for the rows and heads of a tile."""
        if self._sums is None:
            multiplies(weights.swapaxes(2, 3), x, tile.of_keys(self._result))
            return
        shape = (*tile.shape[:2], *self._shape[2:])
        size = prod(shape)
        sums, sees_all = self._sums[:size].reshape(shape), tile.shape[3] == shape[2]
        if tile.is_first and not sees_all:
            sums.fill(0)
        adds = not (tile.is_first and sees_all)
        multiplies(weights.swapaxes(2, 3), x, sums[:, :, tile.positions], adds=adds)
        if tile.is_last:
            lower(self._sums[:size], bits(self._rounded_sums[:size]))
            gradient = self._result[tile.sequences, :, tile.keys]
            gradient[...] = self._rounded_sums[:size].reshape(shape).transpose(0, 2, 1, 3)
