"""Cross-entropy on CPUs: logits become their gradient in place, row by row, while a row is in cache.

`linear_cross_entropy` does the head's product, the loss and both gradients for a chunk of rows at a time, so
that no more than one chunk of logits exists, however large the vocabulary is.
"""

from __future__ import annotations

import numpy as np

from zero_mpi.device.arrays import recycled
from zero_mpi.device.types import Array
from zero_mpi.ops import reference
from zero_mpi.ops.cpu.blas import by_rows, fitting, multiply
from zero_mpi.ops.cpu.embedding import checked
from zero_mpi.ops.cpu.jit import (
    DOUBLE,
    FLOAT,
    FLOAT32,
    INTEGER,
    ONE,
    TRUTH,
    ZERO,
    exponential,
    f4,
    filled,
    flat,
    given,
    kernel,
    row_most,
    single,
)
from zero_mpi.ops.cpu.linear import add_columns, add_row
from zero_mpi.ops.reference import chunk_rows, rows


@kernel(filled(2), given(1, INTEGER), FLOAT, TRUTH, returns=DOUBLE)
def consume_logits(z: Array, targets: Array, scale: float, gradient: bool) -> float:
    """Sum of -log softmax(z)[target] over rows; with `gradient`, z becomes that sum's gradient times scale.

    Without it z is left as it is.
    """
    n, width = z.shape
    total = 0.0
    for i in range(n):
        row = z[i]
        most = row_most(row)
        picked = np.float64(row[targets[i]] - most)
        weight = ZERO
        if gradient:
            for j in range(width):
                e = exponential(row[j] - most)
                row[j] = e
                weight += e
            share = scale / weight
            for j in range(width):
                row[j] *= share
            row[targets[i]] -= scale
        else:
            for j in range(width):
                weight += exponential(row[j] - most)
        total += np.log(np.float64(weight)) - picked
    return total


def cross_entropy(logits: Array, targets: Array, scale: float) -> tuple[np.float64, Array]:
    """`reference.cross_entropy`."""
    if not single(logits):
        return reference.cross_entropy(logits, targets, scale)
    dlogits = recycled(logits.shape)
    np.copyto(dlogits, logits)
    total = consume_logits(rows(dlogits), checked(targets, logits.shape[-1]), f4(scale), True)
    return np.float64(total * scale), dlogits


def linear_cross_entropy(
    x: Array,
    w: Array,
    b: Array | None,
    targets: Array,
    scale: float,
    dw: Array | None = None,
    db: Array | None = None,
    need_dx: bool = True,
) -> tuple[np.float64, Array | None]:
    """`reference.linear_cross_entropy`."""
    if (
        not x.dtype == w.dtype == FLOAT32
        or (dw is not None and not by_rows(dw))
        or not (db is None or db.dtype == FLOAT32)
    ):
        return reference.linear_cross_entropy(x, w, b, targets, scale, dw, db, need_dx)
    inputs, weights, ids = fitting(rows(x)), fitting(w), checked(targets, w.shape[0])
    n, vocabulary = inputs.shape[0], w.shape[0]
    step = chunk_rows(n, vocabulary)
    room = recycled((step, vocabulary))
    dx = recycled(x.shape) if need_dx else None
    gradient = need_dx or dw is not None or db is not None
    total = 0.0
    for start in range(0, n, step):
        part = slice(start, min(start + step, n))
        z = room[: part.stop - start]
        multiply(inputs[part], weights.T, ZERO, z)
        if b is not None:
            add_row(flat(b), z)
        total += consume_logits(z, ids[part], f4(scale), gradient)
        if dw is not None:
            multiply(z.T, inputs[part], ONE, dw)
        if db is not None:
            add_columns(z, db)
        if dx is not None:
            multiply(z, weights, ZERO, rows(dx)[part])
    return np.float64(total * scale), dx
