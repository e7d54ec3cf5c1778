"""Causal attention with grouped key/value heads, as a chain of small layers over (q, k, v).

    Chain(ProjectQKV | FusedQKV, QKNorm, RoPE, CausalAttention, MergeHeads, Linear)

Shapes: q (B, T, H, D), k (B, T, K, D), v (B, T, K, E); B sequences, T positions, H query heads, K key/value
heads, D and E the widths of a key and of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from zero_mpi import device, ops
from zero_mpi.device.arrays import namespace, side_by_side
from zero_mpi.nn.batch import batch_of, first_in_window
from zero_mpi.nn.layer import Cache, Composite, Gradients, Layer, Weights
from zero_mpi.nn.linear import Linear, Rows, rows_of
from zero_mpi.nn.norm import RMSNorm
from zero_mpi.ops.elementary import cosines, power, sines


@dataclass(frozen=True)
class Heads:
    """Numbers of heads, and the widths of their keys and values."""

    query: int
    kv: int
    key_width: int
    value_width: int

    @property
    def widths(self) -> tuple[int, int, int]:
        """Numbers of columns of q, k and v, with all heads concatenated."""
        return self.query * self.key_width, self.kv * self.key_width, self.kv * self.value_width

    def split(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """Reshape q, k and v from (B, T, heads * width) to (B, T, heads, width)."""
        lead = q.shape[:2]
        return (
            q.reshape(*lead, self.query, self.key_width),
            k.reshape(*lead, self.kv, self.key_width),
            v.reshape(*lead, self.kv, self.value_width),
        )


def merge(x: Any) -> Any:
    """Reshape (B, T, heads, width) to (B, T, heads * width)."""
    return x.reshape(*x.shape[:2], -1)


class ProjectQKV(Composite):
    """Layer x (B, T, C) -> (q, k, v), with matrices `PREFIX.attn_q`, `.attn_k`, `.attn_v`."""

    keeps_results = False

    def __init__(self, prefix: str, width: int, heads: Heads, *, bias: bool = False) -> None:
        self.heads = heads
        widths = zip("qkv", heads.widths, strict=True)
        self.linears = [Linear(f"{prefix}.attn_{letter}", width, rows, bias=bias) for letter, rows in widths]
        self.projections: Sequence[Linear | Rows] = self.linears

    def parts(self) -> Sequence[Layer]:
        return self.linears

    def forward(self, p: Weights, x: Any) -> tuple[Any, Any]:
        results, saved = zip(*(linear.forward(p, x) for linear in self.projections), strict=True)
        return self.heads.split(*results), saved

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        dx = None
        for linear, activations, d in zip(self.projections, saved, dy, strict=True):
            dx = linear.backward(p, activations, merge(d), g, dx)
        return dx


class JointQKV(ProjectQKV):
    """Layer x (B, T, C) -> (q, k, v), with one matrix `PREFIX.attn_qkv`: rows of q, then k, then v.

    q, k and v are each contiguous, unlike those of `FusedQKV`, so RoPE can rotate them in place.
    """

    def __init__(self, prefix: str, width: int, heads: Heads, *, bias: bool = False) -> None:
        self.heads = heads
        self.linears = [Linear(f"{prefix}.attn_qkv", width, sum(heads.widths), bias=bias, fused=heads.widths)]
        self.projections = rows_of(self.linears[0], heads.widths)


class FusedQKV(JointQKV):
    """`JointQKV` with a single matrix product; q, k and v are columns of its result."""

    def forward(self, p: Weights, x: Any) -> tuple[Any, Any]:
        qkv, saved = self.linears[0].forward(p, x)
        a, b, _ = self.heads.widths
        return self.heads.split(qkv[..., :a], qkv[..., a : a + b], qkv[..., a + b :]), saved

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        dqkv = side_by_side(dy)  # attention's backward returns dq, dk and dv as columns of one array
        if dqkv is None:
            dqkv = namespace(saved[0]).concatenate([merge(d) for d in dy], axis=-1)
        return self.linears[0].backward(p, saved, dqkv, g)


class QKNorm(Composite):
    """Layer that normalizes q and k head by head, with `PREFIX.attn_q_norm` and `.attn_k_norm` (D,).

    Henry et al., "Query-Key Normalization for Transformers", 2020, here with RMSNorm.
    """

    keeps_results = False

    def __init__(self, prefix: str, width: int, eps: float) -> None:
        self.norms = [RMSNorm(f"{prefix}.attn_{letter}_norm", width, eps) for letter in "qk"]

    def parts(self) -> Sequence[Layer]:
        return self.norms

    def forward(self, p: Weights, x: Any) -> tuple[Any, Any]:
        *qk, v = x
        (q, saved_q), (k, saved_k) = (norm.forward(p, y) for norm, y in zip(self.norms, qk, strict=True))
        return (q, k, v), (saved_q, saved_k)

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        *dqk, dv = dy
        dq, dk = (norm.backward(p, s, d, g) for norm, s, d in zip(self.norms, saved, dqk, strict=True))
        return dq, dk, dv


class JointQKNorm(QKNorm):
    """Layer that normalizes q and k over all their heads together, with weights (H D,) and (K D,).

    Groeneveld et al., "2 OLMo 2 Furious", 2024.
    """

    def __init__(self, prefix: str, heads: Heads, eps: float) -> None:
        widths = zip("qk", heads.widths, strict=False)
        self.norms = [RMSNorm(f"{prefix}.attn_{letter}_norm", width, eps) for letter, width in widths]

    def forward(self, p: Weights, x: Any) -> tuple[Any, Any]:
        q, k, v = x
        (a, b, _), saved = super().forward(p, (merge(q), merge(k), v))
        return (a.reshape(q.shape), b.reshape(k.shape), v), saved

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        dq, dk, dv = dy
        a, b, _ = super().backward(p, saved, (merge(dq), merge(dk), dv), g)
        return a.reshape(dq.shape), b.reshape(dk.shape), dv


Scaling = tuple[float, tuple[float, ...], float]  # base and divisors of the frequencies, magnitude


@lru_cache(maxsize=32)
def rope_table(
    positions: int, width: int, scaling: Scaling, sign: int, dtype: str, on_gpu: bool
) -> tuple[Any, Any]:
    """Return cosines and sines (positions, width / 2) of sign * position * frequency, times the magnitude.

    The frequency of pair j is base^(-2 j / width) / factors[j]; without factors, it is base^(-2 j / width).
    """
    base, factors, magnitude = scaling
    frequencies = power(base, -np.arange(0, width, 2, dtype=np.float64) / width)
    frequencies = frequencies / factors if factors else frequencies
    angles = sign * np.outer(np.arange(positions), frequencies)
    place = device.in_use() if on_gpu else device.HOST
    cos, sin = (place.from_host((magnitude * turn(angles)).astype(dtype)) for turn in (cosines, sines))
    return cos, sin


class RoPE(Layer):
    """Rotation of q and k by their positions; `interleaved`: llama.cpp's NORM order, otherwise NEOX.

    `factors` (one per pair, or none) divide the frequencies; Llama 3 uses them for long contexts. YaRN also
    multiplies rotated elements by a `magnitude` (Peng et al., 2023). `width`: number of elements at the start
    of a head that are rotated; None: all.
    """

    backward_reads_params = False
    overwrites = False

    def __init__(
        self,
        base: float,
        *,
        interleaved: bool,
        factors: tuple[float, ...] = (),
        magnitude: float = 1.0,
        width: int | None = None,
    ) -> None:
        self.width, self.scaling = width, (base, factors, magnitude)
        self.interleaved = interleaved

    def overwriting(self) -> RoPE:
        layer = copy(self)
        layer.overwrites = True
        return layer

    def table(self, stop: int, q: Any, sign: int = 1) -> tuple[Any, Any]:
        """Return cosines and sines (positions, rotated width / 2) of at least `stop` positions for q."""
        positions = 1 << (stop - 1).bit_length()  # powers of two, so that generation makes only a few tables
        kind = "float64" if q.dtype.itemsize == 8 else "float32"  # the table is never in low precision
        on_gpu = device.is_cupy(q)
        return rope_table(positions, self.width or q.shape[-1], self.scaling, sign, kind, on_gpu)

    def _turn(self, p: Weights, qkv: Any, start: int, sign: int) -> Any:
        q, k, v = qkv
        stop = start + q.shape[1]
        cos, sin = self.table(stop, q, sign)
        documents = batch_of(p).documents
        if documents is not None:
            return *(self._turn_rows(x, documents.rows(cos), documents.rows(sin)) for x in (q, k)), v
        table = cos[start:stop], sin[start:stop]
        q, k = (ops.rope(x, *table, self.interleaved, x if self.overwrites else None) for x in (q, k))
        return q, k, v

    def _turn_rows(self, x: Any, cos: Any, sin: Any) -> Any:
        """Rotate `x` (B, T, heads, D) by separate angles for each of the B T positions."""
        row = x.reshape(1, -1, *x.shape[2:])
        return ops.rope(row, cos, sin, self.interleaved, row if self.overwrites else None).reshape(x.shape)

    def forward(self, p: Weights, x: Any) -> tuple[Any, Any]:
        return self._turn(p, x, 0, 1), None

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        return self._turn(p, dy, 0, -1)

    def infer(self, p: Weights, x: Any, cache: Cache) -> Any:
        return self._turn(p, x, cache.position, 1)


class CausalAttention(Layer):
    """Layer (q, k, v) -> (B, T, H, E): each position attends to itself and to earlier positions.

    `window`: number of positions that a position sees, itself included (Beltagy et al., "Longformer", 2020).
    """

    keeps_results = False
    backward_reads_params = False

    def __init__(self, scale: float, window: int | None = None) -> None:
        self.scale, self.window = scale, window

    def _begins(self, p: Weights, q: Any, start: int) -> Any:
        """Return the first position that each query attends to, (B, T); None if it is 0 for all queries."""
        documents, stop = batch_of(p).documents, start + q.shape[1]
        if self.window is None or stop <= self.window:
            return None if documents is None else documents.begins
        if documents is not None:
            return documents.within(self.window)
        return first_in_window(q.shape[0], start, stop, self.window, device.home_of(q))

    def forward(self, p: Weights, x: Any) -> tuple[Any, Any]:
        y, stats = ops.causal_attention(x[0], x[1], x[2], self.scale, self._begins(p, x[0], 0))
        return y, (*x, stats)

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        q, k, v, stats = saved
        return ops.causal_attention_backward(dy, q, k, v, stats, self.scale)

    def infer(self, p: Weights, x: Any, cache: Cache) -> Any:
        q, k, v = x
        start, stop = cache.position, cache.position + k.shape[1]
        keys, values = cache.extend(self, k, v, stop)
        keys[:, start:stop], values[:, start:stop] = k, v
        return ops.causal_attention(
            q, keys[:, :stop], values[:, :stop], self.scale, self._begins(p, q, start)
        )[0]


class MergeHeads(Layer):
    """Layer that reshapes (B, T, H, E) to (B, T, H * E)."""

    backward_reads_params = False

    def forward(self, p: Weights, x: Any) -> tuple[Any, Any]:
        return merge(x), x.shape

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        return dy.reshape(saved)
