"""RMSNorm and LayerNorm on CPUs: a row comes from memory once and is in the first-level cache after that."""

from __future__ import annotations

import numpy as np

from zero_mpi.device.arrays import recycled
from zero_mpi.device.types import Array
from zero_mpi.ops import reference
from zero_mpi.ops.cpu.jit import (
    FLOAT,
    FLOAT32,
    ONE,
    TRUTH,
    ZERO,
    f4,
    filled,
    flat,
    given,
    kernel,
    lanes_of,
    matrix,
    settle,
    single,
)
from zero_mpi.ops.rowsums import LANES


@kernel(given(2), given(1), FLOAT, filled(2), filled(1))
def rms_forward(x: Array, w: Array, eps: float, y: Array, r: Array) -> None:
    """y = x * r * w, with r the reciprocal root of each row's mean square plus eps."""
    n, width = x.shape
    for i in range(n):
        square = ZERO
        for j in range(width):
            square += x[i, j] * x[i, j]
        q = ONE / np.sqrt(square / f4(width) + eps)
        r[i] = q
        for j in range(width):
            y[i, j] = x[i, j] * q * w[j]


@kernel(given(2), given(2), given(1), given(1), TRUTH, given(2), filled(2), filled(1))
def rms_backward(
    dy: Array, x: Array, w: Array, r: Array, adds: bool, plus: Array, dx: Array, dw: Array
) -> None:
    """dx = r (d - n mean(d n)) with d = dy w and n = x r, + plus if `adds`; dw += sums of dy n over rows."""
    n, width = x.shape
    lanes = lanes_of(width)
    for i in range(n):
        q, lane = r[i], lanes[i % LANES]
        along = ZERO
        for j in range(width):
            along += dy[i, j] * w[j] * x[i, j]
        c = along * q * q * q / f4(width)
        for j in range(width):
            inner = q * w[j] * dy[i, j] - c * x[i, j]
            dx[i, j] = plus[i, j] + inner if adds else inner
            lane[j] += dy[i, j] * x[i, j] * q
        settle(lanes, i, n)
    dw += lanes[LANES]


@kernel(given(2), given(1), given(1), FLOAT, filled(2), filled(1), filled(1))
def layer_forward(x: Array, w: Array, b: Array, eps: float, y: Array, mean: Array, r: Array) -> None:
    """y = (x - mean) * r * w + b; the variance from the centred values, which does not cancel."""
    n, width = x.shape
    for i in range(n):
        total = ZERO
        for j in range(width):
            total += x[i, j]
        middle = total / f4(width)
        square = ZERO
        for j in range(width):
            d = x[i, j] - middle
            square += d * d
        q = ONE / np.sqrt(square / f4(width) + eps)
        mean[i] = middle
        r[i] = q
        for j in range(width):
            y[i, j] = (x[i, j] - middle) * q * w[j] + b[j]


@kernel(*[given(2)] * 2, *[given(1)] * 3, TRUTH, given(2), filled(2), filled(1), filled(1))
def layer_backward(
    dy: Array,
    x: Array,
    w: Array,
    mean: Array,
    r: Array,
    adds: bool,
    plus: Array,
    dx: Array,
    dw: Array,
    db: Array,
) -> None:
    """dx = r (d - mean(d) - n mean(d n)) with d = dy w and n = (x - mean) r, + plus if `adds`.

    dw, db += sums over rows.
    """
    n, width = x.shape
    weights, biases = lanes_of(width), lanes_of(width)
    for i in range(n):
        q, middle = r[i], mean[i]
        weight, bias = weights[i % LANES], biases[i % LANES]
        total, along = ZERO, ZERO
        for j in range(width):
            d = dy[i, j] * w[j]
            total += d
            along += d * (x[i, j] - middle)
        total /= f4(width)
        along *= q * q / f4(width)
        for j in range(width):
            centred = x[i, j] - middle
            inner = q * (dy[i, j] * w[j] - total - centred * along)
            dx[i, j] = plus[i, j] + inner if adds else inner
            weight[j] += dy[i, j] * centred * q
            bias[j] += dy[i, j]
        settle(weights, i, n)
        settle(biases, i, n)
    dw += weights[LANES]
    db += biases[LANES]


def spare(dw: Array | None, w: Array) -> Array:
    """dw, or for a frozen parameter some room to sum into: the same code runs, so dx has the same bits."""
    return np.zeros_like(w) if dw is None else dw


def room(*sums: Array | None) -> bool:
    """Whether kernels can add into these where they lie."""
    return all(x is None or (x.dtype == FLOAT32 and x.flags.c_contiguous) for x in sums)


def rms_norm(x: Array, w: Array, eps: float) -> tuple[Array, Array]:
    """`reference.rms_norm`."""
    if not single(x, w):
        return reference.rms_norm(x, w, eps)
    y, r = recycled(x.shape), recycled((*x.shape[:-1], 1))
    rms_forward(matrix(x), flat(w), f4(eps), matrix(y), flat(r))
    return y, r


def addend(plus: Array | None, dy: Array) -> tuple[bool, Array]:
    """Whether something is added to dx, and what; else an array of the same shape that is not looked at."""
    return (False, dy) if plus is None else (True, matrix(plus))


def rms_norm_backward(
    dy: Array, x: Array, w: Array, r: Array, dw: Array | None, plus: Array | None = None
) -> Array:
    """`reference.rms_norm_backward`."""
    if not single(dy, x, w) or not room(dw, plus):
        return reference.rms_norm_backward(dy, x, w, r, dw, plus)
    dx, d = recycled(x.shape), matrix(dy)
    rms_backward(d, matrix(x), flat(w), flat(r), *addend(plus, d), matrix(dx), spare(dw, w))
    return dx


def layer_norm(x: Array, w: Array, b: Array, eps: float) -> tuple[Array, Array, Array]:
    """`reference.layer_norm`."""
    if not single(x, w, b):
        return reference.layer_norm(x, w, b, eps)
    y, mean, r = recycled(x.shape), recycled((*x.shape[:-1], 1)), recycled((*x.shape[:-1], 1))
    layer_forward(matrix(x), flat(w), flat(b), f4(eps), matrix(y), flat(mean), flat(r))
    return y, mean, r


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
    """`reference.layer_norm_backward`."""
    if not single(dy, x, w) or not room(dw, db, plus):
        return reference.layer_norm_backward(dy, x, w, mean, r, dw, db, plus)
    dx, d = recycled(x.shape), matrix(dy)
    sums = spare(dw, w), spare(db, w)
    layer_backward(d, matrix(x), flat(w), flat(mean), flat(r), *addend(plus, d), matrix(dx), *sums)
    return dx
