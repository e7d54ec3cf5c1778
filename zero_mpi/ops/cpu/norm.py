"""RMSNorm and LayerNorm on CPUs. Only the first pass over a row reads memory; later passes hit the cache."""

import numpy as np

from zero_mpi.device.arrays import recycled
from zero_mpi.device.types import Array
from zero_mpi.ops import reference
from zero_mpi.ops.cpu.jit import (
    ONE,
    ZERO,
    add_sums,
    adds_into,
    alike,
    f4,
    flat,
    kernel,
    lanes_of,
    matrix,
    narrow,
    settle,
    sums_for,
    wide,
)
from zero_mpi.ops.flat_reference import LANES
from zero_mpi.ops.registry import definitions, implements
from zero_mpi.ops.threads import in_parts, with_sums


@kernel("e2 e1 f e2+ f1+")
def rms_forward(x: Array, w: Array, eps: float, y: Array, r: Array) -> None:
    """Compute y = x * r * w, where r is the reciprocal root of each row's mean square plus eps."""
    n, width = x.shape
    for i in range(n):
        square = ZERO
        for j in range(width):
            v = wide(x[i, j])
            square += v * v
        q = ONE / np.sqrt(square / f4(width) + eps)
        r[i] = q
        for j in range(width):
            y[i, j] = narrow(y, wide(x[i, j]) * q * wide(w[j]))


@kernel("e2 e2 e1 f1 b e2 e2+ f1+")
def rms_backward(
    dy: Array, x: Array, w: Array, r: Array, adds: bool, plus: Array, dx: Array, dw: Array
) -> None:
    """Fill dx = r (d - n mean(d n)) with d = dy w and n = x r, + plus if `adds`; add sums of dy n to dw."""
    n, width = x.shape
    lanes = lanes_of(width)
    for i in range(n):
        q, lane = r[i], lanes[i % LANES]
        dot = ZERO
        for j in range(width):
            dot += wide(dy[i, j]) * wide(w[j]) * wide(x[i, j])
        c = dot * q * q * q / f4(width)
        for j in range(width):
            inner = q * wide(w[j]) * wide(dy[i, j]) - c * wide(x[i, j])
            dx[i, j] = narrow(dx, wide(plus[i, j]) + inner if adds else inner)
            lane[j] += wide(dy[i, j]) * wide(x[i, j]) * q
        settle(lanes, i, n)
    dw += lanes[LANES]


@kernel("e2 e1 e1 f e2+ f1+ f1+")
def layer_forward(x: Array, w: Array, b: Array, eps: float, y: Array, mean: Array, r: Array) -> None:
    """Compute y = (x - mean) * r * w + b; the mean is subtracted before squaring, to avoid cancellation."""
    n, width = x.shape
    for i in range(n):
        total = ZERO
        for j in range(width):
            total += wide(x[i, j])
        middle = total / f4(width)
        square = ZERO
        for j in range(width):
            d = wide(x[i, j]) - middle
            square += d * d
        q = ONE / np.sqrt(square / f4(width) + eps)
        mean[i] = middle
        r[i] = q
        for j in range(width):
            y[i, j] = narrow(y, (wide(x[i, j]) - middle) * q * wide(w[j]) + wide(b[j]))


@kernel("e2 e2 e1 f1 f1 b e2 e2+ f1+ f1+")
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
    """Fill dx = r (d - mean(d) - n mean(d n)) with d = dy w and n = (x - mean) r, + plus if `adds`.

    Add the sums over rows to dw and db.
    """
    n, width = x.shape
    weights, biases = lanes_of(width), lanes_of(width)
    for i in range(n):
        q, middle = r[i], mean[i]
        weight, bias = weights[i % LANES], biases[i % LANES]
        total, dot = ZERO, ZERO
        for j in range(width):
            d = wide(dy[i, j]) * wide(w[j])
            total += d
            dot += d * (wide(x[i, j]) - middle)
        total /= f4(width)
        dot *= q * q / f4(width)
        for j in range(width):
            slope, centred = wide(dy[i, j]), wide(x[i, j]) - middle
            inner = q * (slope * wide(w[j]) - total - centred * dot)
            dx[i, j] = narrow(dx, wide(plus[i, j]) + inner if adds else inner)
            weight[j] += slope * centred * q
            bias[j] += slope
        settle(weights, i, n)
        settle(biases, i, n)
    dw += weights[LANES]
    db += biases[LANES]


def kernels_take(dy: Array, x: Array, w: Array, plus: Array | None, *sums: Array | None) -> bool:
    return alike(dy, x, w, plus) and adds_into(plus, *sums)


@implements(reference.rms_norm)
def rms_norm(x: Array, w: Array, eps: float) -> tuple[Array, Array]:
    if not alike(x, w):
        return definitions.rms_norm(x, w, eps)
    y, r = recycled(x.shape, x.dtype), recycled((*x.shape[:-1], 1))
    xs, ws, ys, rs = matrix(x), flat(w), matrix(y), flat(r)
    in_parts(xs.shape, lambda part: rms_forward(xs[part], ws, f4(eps), ys[part], rs[part]))
    return y, r


def addend(plus: Array | None, dy: Array) -> tuple[bool, Array]:
    """Return (True, plus as a matrix), or (False, an array of that shape which kernels do not read)."""
    return (False, dy) if plus is None else (True, matrix(plus))


@implements(reference.rms_norm_backward)
def rms_norm_backward(
    dy: Array, x: Array, w: Array, r: Array, dw: Array | None, plus: Array | None = None
) -> Array:
    if not kernels_take(dy, x, w, plus, dw):
        return definitions.rms_norm_backward(dy, x, w, r, dw, plus)
    dx, d, sums = recycled(x.shape, x.dtype), matrix(dy), sums_for(dw, w)
    (adds, p), xs, ws, rs, dxs = addend(plus, d), matrix(x), flat(w), flat(r), matrix(dx)

    def work(part: slice, dw: Array) -> None:
        rms_backward(d[part], xs[part], ws, rs[part], adds, p[part], dxs[part], dw)

    with_sums(d.shape, work, sums)
    add_sums(sums, dw)
    return dx


@implements(reference.layer_norm)
def layer_norm(x: Array, w: Array, b: Array, eps: float) -> tuple[Array, Array, Array]:
    if not alike(x, w, b):
        return definitions.layer_norm(x, w, b, eps)
    y, mean, r = recycled(x.shape, x.dtype), recycled((*x.shape[:-1], 1)), recycled((*x.shape[:-1], 1))
    xs, ys, means, rs, factors = matrix(x), matrix(y), flat(mean), flat(r), (flat(w), flat(b), f4(eps))
    in_parts(xs.shape, lambda part: layer_forward(xs[part], *factors, ys[part], means[part], rs[part]))
    return y, mean, r


@implements(reference.layer_norm_backward)
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
    if not kernels_take(dy, x, w, plus, dw, db):
        return definitions.layer_norm_backward(dy, x, w, mean, r, dw, db, plus)
    dx, d = recycled(x.shape, x.dtype), matrix(dy)
    sums = sums_for(dw, w), sums_for(db, w)
    (adds, p), xs, ws, dxs = addend(plus, d), matrix(x), flat(w), matrix(dx)
    means, rs = flat(mean), flat(r)

    def work(part: slice, dw: Array, db: Array) -> None:
        rows = d[part], xs[part], ws, means[part], rs[part]
        layer_backward(*rows, adds, p[part], dxs[part], dw, db)

    with_sums(d.shape, work, *sums)
    add_sums(sums[0], dw)
    add_sums(sums[1], db)
    return dx
