"""Cross-entropy on CPUs: logits become their gradient in place, row by row, while a row is in cache.

`linear_cross_entropy` computes the head's product, the loss and the gradients for a chunk of rows at a time,
so that only one chunk of logits exists, whatever the size of the vocabulary. For bfloat16 inputs, logits are
float32; their gradient is rounded in place, and dw is rounded once per chunk.
"""

import numpy as np

from zero_mpi.arguments import UNCOUNTED
from zero_mpi.device.arrays import recycled
from zero_mpi.device.types import Array
from zero_mpi.ops import reference
from zero_mpi.ops.cpu.blas import by_rows, fitting
from zero_mpi.ops.cpu.embedding import checked
from zero_mpi.ops.cpu.jit import FLOAT32, exponential, f4, flat, kernel, log_double, narrow, row_most, single
from zero_mpi.ops.cpu.products import add_columns, add_row, multiplier, otherwise
from zero_mpi.ops.low_precision import BFLOAT16, widened
from zero_mpi.ops.reference import chunk_rows, rows
from zero_mpi.ops.registry import implements
from zero_mpi.ops.threads import in_parts, with_sums

Loss = tuple[np.float64, Array | None]
NOTHING = np.zeros((0, 0), np.uint16)  # argument for `low` if no bfloat16 gradient is written


@kernel("f2+ l2+ i1 f b -> d")
def consume_logits(z: Array, low: Array, targets: Array, scale: float, gradient: bool) -> float:
    """Return the sum of -log softmax(z)[target] over rows; if `gradient`, turn z into its gradient * scale.

    Otherwise z does not change. low: z viewed as 16-bit numbers, or empty. If `low` is not empty, the first
    half of each of its rows becomes the gradient in bfloat16, and z must not be used any more. A row whose
    target does not count adds 0 to the sum and has a gradient of zeros.
    """
    n, width = z.shape
    total = 0.0
    weights = np.empty(width, np.float32)  # the loop and its bits are the same with and without `gradient`
    for i in range(n):
        row = z[i]
        if targets[i] == UNCOUNTED:
            if gradient:
                row[:] = 0
            continue
        most = row_most(row)
        picked = np.float64(row[targets[i]] - most)
        weight = f4(0)
        for j in range(width):
            e = exponential(row[j] - most)
            weights[j] = e
            weight += e
        if gradient:
            share = scale / weight
            for j in range(width):
                weights[j] *= share
            weights[targets[i]] -= scale
            if low.size:
                for j in range(width):
                    low[i, j] = narrow(low, weights[j])
            else:
                row[:] = weights
        total += log_double(np.float64(weight)) - picked
    return total


def consume(z: Array, low: Array, targets: Array, scale: float, gradient: bool) -> float:
    """Run `consume_logits` with the rows divided among the threads."""

    def work(part: slice) -> float:
        return consume_logits(z[part], low[part], targets[part], f4(scale), gradient)

    return sum(in_parts(z.shape, work))


@implements(reference.cross_entropy, low=())
def cross_entropy(logits: Array, targets: Array, scale: float) -> tuple[np.float64, Array]:
    if not single(logits):
        return reference.cross_entropy(logits, targets, scale)
    dlogits = recycled(logits.shape)
    np.copyto(dlogits, logits)
    total = consume(rows(dlogits), NOTHING, checked(targets, logits.shape[-1], UNCOUNTED), scale, True)
    return np.float64(total * scale), dlogits


def can_add(x: Array, dw: Array | None, db: Array | None) -> bool:
    """Return whether kernels can add the gradients of a head's parameters in place."""
    fits = dw is None or (by_rows(dw) and dw.dtype in (x.dtype, FLOAT32))
    return fits and (db is None or (x.dtype == db.dtype == FLOAT32 and db.flags.c_contiguous))


@implements(reference.linear_cross_entropy)
def linear_cross_entropy(
    x: Array,
    w: Array,
    b: Array | None,
    targets: Array,
    scale: float,
    dw: Array | None = None,
    db: Array | None = None,
    need_dx: bool = True,
) -> Loss:
    multiplies = multiplier(x, w, b) if can_add(x, dw, db) else None
    if multiplies is None:
        return otherwise(linear_cross_entropy, x, w, b, targets, scale, dw, db, need_dx)
    inputs, weights, ids = fitting(rows(x)), fitting(w), checked(targets, w.shape[0], UNCOUNTED)
    n, vocabulary = inputs.shape[0], w.shape[0]
    step = chunk_rows(n, vocabulary)
    buffer = recycled((step, vocabulary))
    dx = recycled(x.shape, x.dtype) if need_dx else None
    gradient, bias = need_dx or dw is not None or db is not None, None if b is None else flat(widened(b))
    total = 0.0
    for start in range(0, n, step):
        part = slice(start, min(start + step, n))
        z = multiplies(inputs[part], weights.T, buffer[: part.stop - start])
        if bias is not None:
            add_row(bias, z)
        low = NOTHING if x.dtype == FLOAT32 or not gradient else z.view(np.uint16)
        total += consume(z, low, ids[part], scale, gradient)
        slopes = low.view(BFLOAT16)[:, :vocabulary] if low.size else z
        if dw is not None:
            multiplies(slopes.T, inputs[part], dw, adds=True)
        if db is not None:
            with_sums(z.shape, lambda part, total, z=z: add_columns(z[part], total), db)
        if dx is not None:
            multiplies(slopes, weights, rows(dx)[part])
    return np.float64(total * scale), dx
