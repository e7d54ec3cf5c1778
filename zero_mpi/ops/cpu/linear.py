"""The linear layer on CPUs: one product each, into existing memory (`products`)."""

from __future__ import annotations

import numpy as np

from zero_mpi.device.arrays import recycled
from zero_mpi.device.types import Array
from zero_mpi.ops import reference
from zero_mpi.ops.cpu.blas import by_row, by_rows, fitting
from zero_mpi.ops.cpu.jit import BFLOAT16, FLOAT32, alike, flat, kernel, lanes_of, matrix, settle, wide
from zero_mpi.ops.cpu.products import multiplier, otherwise
from zero_mpi.ops.cpu.sums import add_sums, adds_into, sums_for
from zero_mpi.ops.reference import rows
from zero_mpi.ops.registry import defined, implements
from zero_mpi.ops.rowsums import LANES
from zero_mpi.ops.threads import in_parts, with_sums


@kernel("f1 f2+")
def add_row(b: Array, y: Array) -> None:
    """Compute y (N, O) += b (O,)."""
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            y[i, j] += b[j]


@kernel("f1 f2 f2+")
def add_row_and(b: Array, plus: Array, y: Array) -> None:
    """Compute y (N, O) += b (O,) + plus (N, O), in one pass."""
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            y[i, j] = (y[i, j] + b[j]) + plus[i, j]


@kernel("e2 f1+")
def add_columns(x: Array, out: Array) -> None:
    """Add to out (O,) the sum of x (N, O) over its rows, in the order of `rowsums.column_sums`."""
    n, width = x.shape
    lanes = lanes_of(width)
    for i in range(n):
        lane, row = lanes[i % LANES], x[i]
        for j in range(width):
            lane[j] += wide(row[j])
        settle(lanes, i, n)
    out += lanes[LANES]


@implements(reference.linear)
def linear(x: Array, w: Array, b: Array | None = None, plus: Array | None = None) -> Array:
    multiplies = multiplier(x, w, b, plus)
    if multiplies is None:
        return otherwise(linear, x, w, b, plus)
    y = recycled((*x.shape[:-1], w.shape[0]), x.dtype)
    a, out = fitting(rows(x)), rows(y)
    if x.dtype == BFLOAT16:
        bias = None if b is None else np.ascontiguousarray(b)
        multiplies(a, fitting(w).T, out, bias=bias, plus=None if plus is None else by_row(rows(plus)))
        return y
    multiplies(a, fitting(w).T, out)
    if plus is None:
        if b is not None:
            bias = flat(b)
            in_parts(out.shape, lambda part: add_row(bias, out[part]))
    elif b is not None:
        bias, more = flat(b), matrix(plus)
        in_parts(out.shape, lambda part: add_row_and(bias, more[part], out[part]))
    else:
        np.add(y, plus, out=y)
    return y


@implements(reference.linear_backward_x)
def linear_backward_x(dy: Array, w: Array, into: Array | None = None) -> Array:
    multiplies = multiplier(dy, w, into) if into is None or into.flags.c_contiguous else None
    if multiplies is None:
        return otherwise(linear_backward_x, dy, w, into)
    dx = recycled((*dy.shape[:-1], w.shape[1]), dy.dtype) if into is None else into
    multiplies(fitting(rows(dy)), fitting(w), rows(dx), adds=into is not None)
    return dx


@implements(reference.linear_backward_w)
def linear_backward_w(dy: Array, x: Array, dw: Array) -> None:
    multiplies = multiplier(dy, x) if dw.dtype in (dy.dtype, FLOAT32) and by_rows(dw) else None
    if multiplies is None:
        otherwise(linear_backward_w, dy, x, dw)
    else:
        multiplies(fitting(rows(dy)).T, fitting(rows(x)), dw, adds=True)


@implements(reference.linear_backward_b)
def linear_backward_b(dy: Array, db: Array) -> None:
    if not alike(dy) or not adds_into(db):
        defined.linear_backward_b(dy, db)
        return
    sums = sums_for(db, db)
    columns = matrix(dy)
    with_sums(columns.shape, lambda part, total: add_columns(columns[part], total), sums)
    add_sums(sums, db)
