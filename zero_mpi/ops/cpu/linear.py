"""The linear layer on CPUs: one product each, into memory that is there already.

Products of float32 are BLAS's, those of bfloat16 oneDNN's. Without it they are BLAS's on float32 copies.
"""

from __future__ import annotations

import numpy as np

from zero_mpi.device.arrays import recycled
from zero_mpi.device.types import Array
from zero_mpi.ops import reference
from zero_mpi.ops.cpu import onednn
from zero_mpi.ops.cpu.blas import by_rows, fitting, multiply
from zero_mpi.ops.cpu.jit import (
    BFLOAT16,
    EITHER,
    FLOAT32,
    ONE,
    ZERO,
    alike,
    filled,
    flat,
    given,
    kernel,
    lanes_of,
    matrix,
    settle,
    single,
    wide,
)
from zero_mpi.ops.cpu.onednn import OneDNN
from zero_mpi.ops.cpu.sums import add_sums, adds_into, sums_for
from zero_mpi.ops.low_precision import defined, on_copies
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


@kernel(given(2, EITHER), filled(1))
def add_columns(x: Array, out: Array) -> None:
    """out (O,) += the sum of x (N, O) over its rows, in the order of `rowsums.column_sums`."""
    n, width = x.shape
    lanes = lanes_of(width)
    for i in range(n):
        lane, row = lanes[i % LANES], x[i]
        for j in range(width):
            lane[j] += wide(row[j])
        settle(lanes, i, n)
    out += lanes[LANES]


def library_for(*arrays: Array | None) -> OneDNN | None:
    """What multiplies these in bfloat16, if all are of it and there is a library; None: float32 copies do."""
    given = [array for array in arrays if array is not None]
    return onednn.load()[0] if all(x.dtype == BFLOAT16 and x.size for x in given) else None


def by_row(x: Array) -> Array:
    """A matrix whose rows are contiguous and do not overlap, or a copy that has such."""
    return x if by_rows(x) else np.ascontiguousarray(x)


def linear(x: Array, w: Array, b: Array | None = None, plus: Array | None = None) -> Array:
    """`reference.linear`."""
    if x.dtype == BFLOAT16:
        library = library_for(x, w, b, plus)
        if library is None:
            return on_copies(linear, x, w, b, plus)
        y, beside = (
            recycled((*x.shape[:-1], w.shape[0]), BFLOAT16),
            None if plus is None else by_row(rows(plus)),
        )
        bias = None if b is None else np.ascontiguousarray(b)
        library.multiply(fitting(rows(x)), fitting(w).T, rows(y), bias=bias, plus=beside)
        return y
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
    is_whole = into is None or into.flags.c_contiguous
    if dy.dtype == BFLOAT16:
        library = library_for(dy, w, into) if is_whole else None
        if library is None:
            return on_copies(linear_backward_x, dy, w, into)
        dx = recycled((*dy.shape[:-1], w.shape[1]), BFLOAT16) if into is None else into
        library.multiply(fitting(rows(dy)), fitting(w), rows(dx), adds=into is not None)
        return dx
    if not dy.dtype == w.dtype == FLOAT32 or not is_whole:
        return reference.linear_backward_x(dy, w, into)
    dx = recycled((*dy.shape[:-1], w.shape[1])) if into is None else into
    multiply(fitting(rows(dy)), fitting(w), ZERO if into is None else ONE, rows(dx))
    return dx


def linear_backward_w(dy: Array, x: Array, dw: Array) -> None:
    """`reference.linear_backward_w`."""
    if dy.dtype == BFLOAT16:
        library = library_for(dy, x) if dw.dtype in (BFLOAT16, FLOAT32) and by_rows(dw) else None
        if library is None:
            on_copies(linear_backward_w, dy, x, dw)
        else:
            library.multiply(fitting(rows(dy)).T, fitting(rows(x)), dw, adds=True)
    elif not dy.dtype == x.dtype == dw.dtype == FLOAT32 or not by_rows(dw):
        reference.linear_backward_w(dy, x, dw)
    else:
        multiply(fitting(rows(dy)).T, fitting(rows(x)), ONE, dw)


def linear_backward_b(dy: Array, db: Array) -> None:
    """`reference.linear_backward_b`."""
    if not alike(dy) or not adds_into(db):
        defined.linear_backward_b(dy, db)
        return
    sums = sums_for(db, db)
    add_columns(matrix(dy), sums)
    add_sums(sums, db)
