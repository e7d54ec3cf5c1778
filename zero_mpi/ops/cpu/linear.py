"""The linear layer on CPUs: one call of BLAS each, into memory that is there already."""

from __future__ import annotations

import numpy as np

from zero_mpi.device.arrays import recycled
from zero_mpi.device.types import Array
from zero_mpi.ops import reference
from zero_mpi.ops.cpu.blas import by_rows, fitting, multiply
from zero_mpi.ops.cpu.jit import (
    FLOAT32,
    ONE,
    ZERO,
    filled,
    flat,
    given,
    kernel,
    lanes_of,
    matrix,
    settle,
    single,
)
from zero_mpi.ops.reference import rows
from zero_mpi.ops.rowsums import LANES


@kernel(given(1), filled(2))
def add_row(b: Array, y: Array) -> None:
    """y (N, O) += b (O,)."""
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            y[i, j] += b[j]


@kernel(given(1), given(2), filled(2))
def add_row_and(b: Array, plus: Array, y: Array) -> None:
    """y (N, O) += b (O,) + plus (N, O), in one pass."""
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            y[i, j] = (y[i, j] + b[j]) + plus[i, j]


@kernel(given(2), filled(1))
def add_columns(x: Array, out: Array) -> None:
    """out (O,) += the sum of x (N, O) over its rows, in the order of `rowsums.column_sums`."""
    n, width = x.shape
    lanes = lanes_of(width)
    for i in range(n):
        lane, row = lanes[i % LANES], x[i]
        for j in range(width):
            lane[j] += row[j]
        settle(lanes, i, n)
    out += lanes[LANES]


def linear(x: Array, w: Array, b: Array | None = None, plus: Array | None = None) -> Array:
    """`reference.linear`."""
    if not x.dtype == w.dtype == FLOAT32 or not (plus is None or single(plus)):
        return reference.linear(x, w, b, plus)
    y = recycled((*x.shape[:-1], w.shape[0]))
    out = rows(y)
    multiply(fitting(rows(x)), fitting(w).T, ZERO, out)
    if plus is None:
        if b is not None:
            add_row(flat(b), out)
    elif b is not None:
        add_row_and(flat(b), matrix(plus), out)
    else:
        np.add(y, plus, out=y)
    return y


def linear_backward_x(dy: Array, w: Array, into: Array | None = None) -> Array:
    """`reference.linear_backward_x`."""
    if not dy.dtype == w.dtype == FLOAT32 or not (into is None or into.flags.c_contiguous):
        return reference.linear_backward_x(dy, w, into)
    dx = recycled((*dy.shape[:-1], w.shape[1])) if into is None else into
    multiply(fitting(rows(dy)), fitting(w), ZERO if into is None else ONE, rows(dx))
    return dx


def linear_backward_w(dy: Array, x: Array, dw: Array) -> None:
    """`reference.linear_backward_w`."""
    if not dy.dtype == x.dtype == dw.dtype == FLOAT32 or not by_rows(dw):
        reference.linear_backward_w(dy, x, dw)
        return
    multiply(fitting(rows(dy)).T, fitting(rows(x)), ONE, dw)


def linear_backward_b(dy: Array, db: Array) -> None:
    """`reference.linear_backward_b`."""
    if not dy.dtype == db.dtype == FLOAT32 or not db.flags.c_contiguous:
        reference.linear_backward_b(dy, db)
        return
    add_columns(matrix(dy), db)
