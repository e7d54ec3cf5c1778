"""Elementwise operations on CPUs: sums, GELU, SwiGLU, the rotary turn. One pass over memory each."""

from __future__ import annotations

from typing import Any

import numpy as np

from zero_mpi.device.arrays import recycled
from zero_mpi.device.types import Array
from zero_mpi.ops import reference
from zero_mpi.ops.cpu.jit import (
    FLOAT32,
    ONE,
    TRUTH,
    exponential,
    f4,
    filled,
    flat,
    given,
    helper,
    kernel,
    logistic,
    single,
)

TWICE_SCALE = f4(2 * reference.GELU_SCALE)
CUBIC, THRICE_CUBIC = f4(reference.GELU_CUBIC), f4(3 * reference.GELU_CUBIC)


@helper
def gelu_share(x: Any) -> Any:
    """The share of x that GELU lets through: (1 + tanh(u)) / 2 = 1 / (1 + e^-2u)."""
    return logistic(TWICE_SCALE * (x + CUBIC * x * x * x))


@kernel(given(1), filled(1))
def gelu_forward(x: Array, y: Array) -> None:
    """Compute y = gelu(x)."""
    for i in range(x.size):
        y[i] = x[i] * gelu_share(x[i])


@kernel(given(1), given(1), filled(1))
def gelu_gradient(dy: Array, x: Array, dx: Array) -> None:
    """dx = dy gelu'(x)."""
    for i in range(x.size):
        v = x[i]
        s = gelu_share(v)
        slope = TWICE_SCALE * (ONE + THRICE_CUBIC * v * v)
        dx[i] = dy[i] * (s + v * s * (ONE - s) * slope)


@kernel(given(1), given(1), filled(1))
def swiglu_forward(gate: Array, up: Array, y: Array) -> None:
    """y = silu(gate) up."""
    for i in range(gate.size):
        y[i] = gate[i] / (ONE + exponential(-gate[i])) * up[i]


@kernel(given(1), given(1), given(1), filled(1), filled(1))
def swiglu_gradient(dy: Array, gate: Array, up: Array, dgate: Array, dup: Array) -> None:
    """(dgate, dup) of silu(gate) up."""
    for i in range(gate.size):
        v, d = gate[i], dy[i]
        s = logistic(v)
        dgate[i] = d * up[i] * s * (ONE + v * (ONE - s))
        dup[i] = d * v * s


@kernel(filled(3), given(2), given(2), TRUTH)
def turn_pairs(x: Array, cos: Array, sin: Array, interleaved: bool) -> None:
    """Turn the pairs of x (B T, H, D) by the angles of their positions: row i is position i mod T."""
    n, heads = x.shape[:2]
    positions, half = cos.shape
    for i in range(n):
        t = i % positions
        for h in range(heads):
            if interleaved:
                for j in range(half):
                    a, b = x[i, h, 2 * j], x[i, h, 2 * j + 1]
                    x[i, h, 2 * j] = a * cos[t, j] - b * sin[t, j]
                    x[i, h, 2 * j + 1] = b * cos[t, j] + a * sin[t, j]
            else:
                first, second = x[i, h, :half], x[i, h, half:]
                for j in range(half):
                    a, b = first[j], second[j]
                    first[j] = a * cos[t, j] - b * sin[t, j]
                    second[j] = b * cos[t, j] + a * sin[t, j]


def add(x: Array, y: Array) -> Array:
    """`reference.add`."""
    if not x.dtype == y.dtype == FLOAT32 or x.shape != y.shape:
        return reference.add(x, y)
    return np.add(x, y, out=recycled(x.shape))  # NumPy's own loop is as good as any


def gelu(x: Array) -> Array:
    """`reference.gelu`."""
    if not single(x):
        return reference.gelu(x)
    y = recycled(x.shape)
    gelu_forward(flat(x), flat(y))
    return y


def gelu_backward(dy: Array, x: Array) -> Array:
    """`reference.gelu_backward`."""
    if not single(dy, x):
        return reference.gelu_backward(dy, x)
    dx = recycled(x.shape)
    gelu_gradient(flat(dy), flat(x), flat(dx))
    return dx


def swiglu(gate: Array, up: Array) -> Array:
    """`reference.swiglu`."""
    if not single(gate, up):
        return reference.swiglu(gate, up)
    y = recycled(gate.shape)
    swiglu_forward(flat(gate), flat(up), flat(y))
    return y


def swiglu_backward(dy: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    """`reference.swiglu_backward`."""
    if not single(dy, gate, up):
        return reference.swiglu_backward(dy, gate, up)
    dgate, dup = recycled(gate.shape), recycled(gate.shape)
    swiglu_gradient(flat(dy), flat(gate), flat(up), flat(dgate), flat(dup))
    return dgate, dup


def rope(x: Array, cos: Array, sin: Array, interleaved: bool, out: Array | None = None) -> Array:
    """`reference.rope`."""
    if not single(x, cos, sin) or not (out is None or (single(out) and out.flags.c_contiguous)):
        return reference.rope(x, cos, sin, interleaved, out)
    y = recycled(x.shape) if out is None else out
    if y is not x:
        y[...] = x
    if x.size:
        cos, sin = np.ascontiguousarray(cos), np.ascontiguousarray(sin)
        turn_pairs(y.reshape(-1, *x.shape[2:]), cos, sin, interleaved)
    return y
