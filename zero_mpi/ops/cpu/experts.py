"""Mixtures of experts on CPUs: kernels for routing, and one product for each expert that has rows."""

from collections.abc import Callable

import numpy as np

from zero_mpi.device.arrays import recycled
from zero_mpi.device.types import Array
from zero_mpi.ops import reference
from zero_mpi.ops.cpu.blas import by_row, fitting
from zero_mpi.ops.cpu.jit import (
    FLOAT32,
    ONE,
    ZERO,
    alike,
    exponential,
    kernel,
    logistic,
    matrix,
    narrow,
    row_most,
    single,
    wide,
)
from zero_mpi.ops.cpu.products import is_prepared, multiplier, otherwise
from zero_mpi.ops.experts_reference import groups
from zero_mpi.ops.registry import definitions, implements
from zero_mpi.ops.threads import in_parts


@kernel("f2 i b f2+ i2+ f2+")
def choose(logits: Array, used: int, normalized: bool, p: Array, chosen: Array, w: Array) -> None:
    """Write each row's softmax to p, its largest elements (any for NaN) to w, and their indices to chosen."""
    for t in range(logits.shape[0]):
        row, out = logits[t], p[t]
        most, total, divisor = row_most(row), ZERO, ZERO
        for j in range(row.size):
            out[j] = exponential(row[j] - most)
            total += out[j]
        for j in range(row.size):
            out[j] = out[j] / total
        last = -1
        for u in range(used):
            best = -1
            for j in range(row.size):  # `follows`: j comes after the last choice in descending order
                follows = last < 0 or out[j] < out[last] or (out[j] == out[last] and j > last)
                if follows and (best < 0 or out[j] > out[best]):
                    best = j
            last = u if best < 0 else best
            chosen[t, u], w[t, u] = last, out[last]
            divisor += out[last]
        for u in range(used if normalized else 0):
            w[t, u] = w[t, u] / divisor


@kernel("i1 f1 i i1+ i1+ i1+ f1+")
def arrange(
    chosen: Array, w: Array, used: int, starts: Array, rows: Array, tokens: Array, out: Array
) -> None:
    """Sort choices by expert, stably; fill starts and the other results of `route` for each row."""
    starts[:] = 0
    for i in range(chosen.size):
        starts[chosen[i] + 1] += 1
    for e in range(starts.size - 1):
        starts[e + 1] += starts[e]
    free = starts.copy()
    for i in range(chosen.size):
        row = free[chosen[i]]
        free[chosen[i]] += 1
        rows[row], tokens[row], out[row] = i, i // used, w[i]


@kernel("e2 e2 f2 e2+")
def weighted_forward(gate: Array, up: Array, w: Array, y: Array) -> None:
    """Compute y = w silu(gate) up."""
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            v = wide(gate[i, j])
            y[i, j] = narrow(y, v / (ONE + exponential(-v)) * wide(up[i, j]) * w[i, 0])


@kernel("e2 e2 e2 f2 e2+ e2+ e2+")
def weighted_gradient(
    dy: Array, gate: Array, up: Array, w: Array, dgate: Array, dup: Array, dw: Array
) -> None:
    """Compute (dgate, dup, dw) of w silu(gate) up."""
    for i in range(dy.shape[0]):
        total = ZERO
        for j in range(dy.shape[1]):
            v, u, d = wide(gate[i, j]), wide(up[i, j]), wide(dy[i, j])
            s = logistic(v)
            total += d * v * s * u
            d *= w[i, 0]
            dgate[i, j] = narrow(dgate, d * u * s * (ONE + v * (ONE - s)))
            dup[i, j] = narrow(dup, d * v * s)
        dw[i, 0] = narrow(dw, total)


@implements(reference.route)
def route(logits: Array, used: int, normalized: bool) -> tuple[Array, ...]:
    if not single(logits):
        return reference.route(logits, used, normalized)
    tokens, count = logits.shape
    p, w = recycled(logits.shape), np.empty((tokens, used), np.float32)
    chosen = recycled((tokens, used), np.int64)
    rows, of_row = (recycled((tokens * used,), np.int64) for _ in range(2))
    weights, starts = recycled((tokens * used, 1)), np.empty(count + 1, np.int64)
    if tokens:
        z = matrix(logits)
        in_parts(z.shape, lambda part: choose(z[part], used, normalized, p[part], chosen[part], w[part]))
    arrange(chosen.reshape(-1), w.reshape(-1), used, starts, rows, of_row, weights.reshape(-1))
    return p, chosen, rows, of_row, weights, starts


@implements(reference.weighted_swiglu)
def weighted_swiglu(gate: Array, up: Array, w: Array) -> Array:
    if not alike(gate, up) or not single(w):
        return definitions.weighted_swiglu(gate, up, w)
    y = recycled(gate.shape, gate.dtype)
    arrays = [matrix(x) for x in (gate, up, w, y)]
    in_parts(gate.shape, lambda part: weighted_forward(*(x[part] for x in arrays)))
    return y


@implements(reference.weighted_swiglu_backward)
def weighted_swiglu_backward(dy: Array, gate: Array, up: Array, w: Array) -> tuple[Array, Array, Array]:
    if not alike(dy, gate, up) or not single(w):
        return definitions.weighted_swiglu_backward(dy, gate, up, w)
    dgate, dup, dw = (recycled(shape, gate.dtype) for shape in (gate.shape, gate.shape, w.shape))
    arrays = [matrix(x) for x in (dy, gate, up, w, dgate, dup, dw)]
    in_parts(gate.shape, lambda part: weighted_gradient(*(x[part] for x in arrays)))
    return dgate, dup, dw


# oneDNN prepares a product for each number of rows. That takes 200 to 300 KiB and as much time as many
# products of an expert. An expert's number of rows varies between calls, so few sizes are allowed.
LEAST_ROWS, STEPS = 16, 8  # the smallest allowed size; number of allowed sizes per power of two


def few(rows: int) -> int:
    """Return the number of rows, rounded up to an allowed size."""
    step = max(LEAST_ROWS, (1 << (rows - 1).bit_length()) // (2 * STEPS))
    return -(-rows // step) * step


def extended(x: Array, part: slice) -> Array:
    """Return a copy of the rows `part` of x, padded with zeros to `few` rows."""
    count = part.stop - part.start
    copy = np.empty((few(count), x.shape[1]), x.dtype)
    copy[:count], copy[count:] = x[part], 0
    return copy


def multiply_rows(
    multiplies: Callable[..., Array],
    x: Array,
    w: Array,
    y: Array,
    part: slice,
    plus: Array | None = None,
    adds: bool = False,
) -> None:
    """Compute y = x w + plus, or y += x w, for the rows `part` of x and y alone. `plus` must be bfloat16."""
    if not is_prepared(x, w):
        multiplies(fitting(x[part]), w, y[part], adds=adds)
        return
    count = part.stop - part.start
    reach, options = slice(part.start, part.start + few(count)), {"adds": adds}
    beyond = reach.stop > len(x)
    if plus is not None:
        options["plus"] = extended(plus, part) if beyond else by_row(plus[reach])
    if beyond:
        y[part] = multiplies(extended(x, part), w, extended(y, part), **options)[:count]
        return
    tail = y[part.stop : reach.stop].copy()
    multiplies(fitting(x[reach]), w, y[reach], **options)
    y[part.stop : reach.stop] = tail


@implements(reference.grouped_linear)
def grouped_linear(x: Array, w: Array, starts: Array, plus: Array | None = None) -> Array:
    multiplies = multiplier(x)
    if multiplies is None:
        return otherwise(grouped_linear, x, w, starts, plus)
    y = recycled((x.shape[0], w.shape[1]), x.dtype)
    fused = None if x.dtype == FLOAT32 else plus
    for expert, part in groups(starts):
        multiply_rows(multiplies, x, fitting(w[expert]).T, y, part, fused)
    return y if plus is None or fused is not None else np.add(y, plus, out=y)


@implements(reference.grouped_linear_backward_x)
def grouped_linear_backward_x(dy: Array, w: Array, starts: Array, into: Array | None = None) -> Array:
    multiplies = multiplier(dy) if into is None or into.flags.c_contiguous else None
    if multiplies is None:
        return otherwise(grouped_linear_backward_x, dy, w, starts, into)
    dx, adds = recycled((dy.shape[0], w.shape[2]), dy.dtype) if into is None else into, into is not None
    for expert, part in groups(starts):
        multiply_rows(multiplies, dy, fitting(w[expert]), dx, part, adds=adds)
    return dx


@implements(reference.grouped_linear_backward_w)
def grouped_linear_backward_w(dy: Array, x: Array, dw: Array, starts: Array) -> None:
    multiplies = multiplier(dy) if dw.dtype in (dy.dtype, FLOAT32) and dw.flags.c_contiguous else None
    if multiplies is None:
        otherwise(grouped_linear_backward_w, dy, x, dw, starts)
        return
    prepared = is_prepared(dy, x)
    for expert, part in groups(starts):
        a, b = (extended(array, part) if prepared else fitting(array[part]) for array in (dy, x))
        multiplies(a.T, b, dw[expert], adds=True)
