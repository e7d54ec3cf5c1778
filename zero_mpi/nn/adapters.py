"""Adapters of frozen matrices: a trained low-rank product (LoRA), or trained rows for added tokens.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021: y = x W^T + s (x a^T) b^T, with
a = `NAME.lora_a` (R, C) random and b = `NAME.lora_b` (O, R) zero at the start, where NAME is the weight's
full name, as in llama.cpp. s is alpha / R.
"""

from functools import singledispatch
from typing import Any

import numpy as np

from zero_mpi import device, ops
from zero_mpi.device.arrays import namespace, pool_of
from zero_mpi.nn.layer import Gradients, Param, Weights
from zero_mpi.ops.rounding import round_to

FIRST, SECOND = ".lora_a", ".lora_b"
ADDED = ".added"  # suffix of a matrix's name: the parameter of its added rows
AT_ONCE = 1 << 16  # elements of a product that are computed together, so that they fit in cache


class LowRank:
    """The adapter of one matrix (O, C), or of a stack of matrices (N, O, C), of rank R.

    If `kind`, a quantized type, is set (not for stacks), layers multiply by the result of `merged`, and
    gradients of a and b ignore the rounding (straight-through). `via`: the operations to use, `ops` or
    `experts.grouped`.
    """

    def __init__(
        self, weight: str, shape: tuple[int, ...], rank: int, scale: float, kind: str | None = None
    ) -> None:
        *stack, outputs, inputs = shape
        self.kind = kind
        self.a, self.b, self.scale = weight + FIRST, weight + SECOND, scale
        self._params = {
            self.a: Param((*stack, rank, inputs), std=inputs**-0.5),
            self.b: Param((*stack, outputs, rank), "zeros"),
        }

    def params(self) -> dict[str, Param]:
        return self._params

    def merged(self, p: Weights, w: Any, part: slice) -> Any:
        """Return w plus the product, rounded to `kind`; w has the rows `part` of the matrix."""
        assert self.kind is not None, "this adapter has no quantized type to round to"
        return w if self.b not in p else merged(w, p[self.a], p[self.b][part], self.scale, self.kind)

    def narrow(self, p: Weights, x: Any, via: Any = ops) -> Any:
        """Return s x a^T (..., R) for x (..., C), or None if b is absent or the product is merged."""
        return self._narrow(p, x, via) if self.b in p and self.kind is None else None

    def _narrow(self, p: Weights, x: Any, via: Any) -> Any:
        return self._scaled(via.linear(x, p[self.a]))

    def add_to(self, y: Any, p: Weights, narrow: Any, part: slice, via: Any = ops) -> Any:
        """Return y + narrow b^T; y has the columns `part` of the O outputs, and may be overwritten."""
        b = p[self.b][part]
        if via is ops:
            return ops.linear_backward_x(narrow, b.T, y)  # adds to y in place: twice as fast as `linear`
        return via.linear(narrow, b, None, y)

    def backward(
        self, p: Weights, saved: Any, dy: Any, g: Gradients, dx: Any, part: slice, via: Any = ops
    ) -> Any:
        """Return dx plus s (dy b) a, or dx if the product is merged; add the gradients of a and b to g.

        saved: x, and the result of `narrow`, which is computed again if it is None
        """
        x, narrow = saved
        if self.b in g:
            narrow = self._narrow(p, x, via) if narrow is None else narrow
            via.linear_backward_w(dy, narrow, g[self.b][part])
        narrow = self._scaled(via.linear_backward_x(dy, p[self.b][part]))
        if self.a in g:
            via.linear_backward_w(narrow, x, g[self.a])
        return dx if self.kind is not None else via.linear_backward_x(narrow, p[self.a], dx)

    def _scaled(self, x: Any) -> Any:
        return x if self.scale == 1 else ops.scale(x, self.scale)


def product(b: Any, a: Any) -> Any:
    """Return b (O, R) @ a (R, C) in float32; no row depends on the machine or on other rows.

    The terms of an element are added in order and each sum is rounded; BLAS would choose its own order.
    """
    out = np.zeros((len(b), a.shape[1]), np.float32)
    step = max(1, AT_ONCE // a.shape[1])
    term = np.empty((step, a.shape[1]), np.float32)
    for first in range(0, len(b), step):
        rows = out[first : first + step]
        for column, row in zip(b[first : first + step].T, a, strict=True):
            rows += np.multiply(column[:, None], row, out=term[: len(rows)])
    return out


@singledispatch
def merged(w: Any, a: Any, b: Any, scale: float, kind: str) -> Any:
    """Return w (O, C) + scale b a, rounded to the values of a quantized type."""
    values = w + np.float32(scale) * product(b, a)
    round_to(kind, values.reshape(-1), values.reshape(-1))
    return values


class AddedRows:
    """Last rows of a matrix (O, C): the parameter `NAME.weight.added` (rows, C), used like an adapter."""

    kind = None

    def __init__(self, weight: str, rows: int, width: int) -> None:
        self.name, self.rows = weight + ADDED, rows
        self._params = {self.name: Param((rows, width))}

    def params(self) -> dict[str, Param]:
        return self._params

    def narrow(self, p: Weights, x: Any, via: Any = ops) -> Any:
        """Return x, which `add_to` multiplies by the added rows."""
        return x

    def add_to(self, y: Any, p: Weights, x: Any, part: slice, via: Any = ops) -> Any:
        """Return y (..., O - rows) followed by the outputs of the added rows: (..., O)."""
        size = y.shape[-1]
        outputs = like(y, size + self.rows)
        outputs[..., :size] = y
        outputs[..., size:] = via.linear(x, p[self.name])
        return outputs

    def backward(
        self, p: Weights, saved: Any, dy: Any, g: Gradients, dx: Any, part: slice, via: Any = ops
    ) -> Any:
        dy = copy_of(dy[..., -self.rows :])
        if self.name in g:
            via.linear_backward_w(dy, saved[0], g[self.name])
        return via.linear_backward_x(dy, p[self.name], dx)


def like(x: Any, width: int) -> Any:
    """Return an array (..., width), shaped like x except for its last axis, in recycled memory."""
    return pool_of(device.in_use()).take((*x.shape[:-1], width), x.dtype)


def copy_of(x: Any) -> Any:
    out = like(x, x.shape[-1])
    out[...] = x
    return out


@singledispatch
def split_tokens(tokens: Any, first: int) -> tuple[Any, Any, Any]:
    """Return tokens with 0 for added ids (>= `first`), and flat positions and row numbers of added ids."""
    flat = tokens.reshape(-1)
    places = namespace(tokens).flatnonzero(flat >= first)
    return tokens * (tokens < first), places, flat[places] - first
