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
    BFLOAT16,
    DOUBLE,
    FLOAT,
    FLOAT32,
    INTEGER,
    LOW,
    ONE,
    TRUTH,
    ZERO,
    exponential,
    f4,
    filled,
    flat,
    given,
    kernel,
    narrow,
    row_most,
    single,
)
from zero_mpi.ops.cpu.linear import add_columns, add_row, library_for
from zero_mpi.ops.cpu.onednn import OneDNN
from zero_mpi.ops.low_precision import on_copies
from zero_mpi.ops.reference import chunk_rows, rows

NOTHING = np.zeros((0, 0), np.uint16)  # in the place of an array that nobody wants


@kernel(filled(2), filled(2, LOW), given(1, INTEGER), FLOAT, TRUTH, returns=DOUBLE)
def consume_logits(z: Array, low: Array, targets: Array, scale: float, gradient: bool) -> float:
    """Sum of -log softmax(z)[target] over rows; with `gradient`, z becomes that sum's gradient times scale.

    Without it z is left as it is. low: z as halves of its elements, or nothing. In the former case the first
    half of each row becomes the gradient in bfloat16, and z is of no more use.
    """
    n, width = z.shape
    total = 0.0
    rounded = np.empty(width if low.size else 0, np.uint16)
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
            if rounded.size:
                for j in range(width):
                    rounded[j] = narrow(rounded, row[j])
                low[i, :width] = rounded
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
    total = consume_logits(rows(dlogits), NOTHING, checked(targets, logits.shape[-1]), f4(scale), True)
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
    """`reference.linear_cross_entropy`; a gradient dw of bfloat16 is rounded once a chunk."""
    if x.dtype == BFLOAT16:
        sound = db is None and (dw is None or by_rows(dw))
        library = library_for(x, w, b) if sound else None
        if library is not None:
            return low_loss(library, x, w, b, targets, scale, dw, need_dx)
        found: tuple[np.float64, Array | None] = on_copies(
            linear_cross_entropy, x, w, b, targets, scale, dw, db, need_dx
        )
        return found
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
        total += consume_logits(z, NOTHING, ids[part], f4(scale), gradient)
        if dw is not None:
            multiply(z.T, inputs[part], ONE, dw)
        if db is not None:
            add_columns(z, db)
        if dx is not None:
            multiply(z, weights, ZERO, rows(dx)[part])
    return np.float64(total * scale), dx


def low_loss(
    library: OneDNN,
    x: Array,
    w: Array,
    b: Array | None,
    targets: Array,
    scale: float,
    dw: Array | None,
    need_dx: bool,
) -> tuple[np.float64, Array | None]:
    """`linear_cross_entropy` of bfloat16: logits are float32, their gradient is rounded where they lie."""
    inputs, weights, ids = fitting(rows(x)), fitting(w), checked(targets, w.shape[0])
    n, vocabulary = inputs.shape[0], w.shape[0]
    step = chunk_rows(n, vocabulary)
    room = recycled((step, vocabulary))
    dx = recycled(x.shape, BFLOAT16) if need_dx else None
    gradient, bias = need_dx or dw is not None, None if b is None else np.ascontiguousarray(b)
    total = 0.0
    for start in range(0, n, step):
        part = slice(start, min(start + step, n))
        z = library.multiply(inputs[part], weights.T, room[: part.stop - start], bias=bias)
        low = z.view(np.uint16)
        total += consume_logits(z, low if gradient else NOTHING, ids[part], f4(scale), gradient)
        slopes = low.view(BFLOAT16)[:, :vocabulary]
        if dw is not None:
            library.multiply(slopes.T, inputs[part], dw, adds=True)
        if dx is not None:
            library.multiply(slopes, weights, rows(dx)[part])
    return np.float64(total * scale), dx
