"""Embeddings on CPUs: rows copied out, gradients of rows added in the order of the tokens."""

from __future__ import annotations

import numpy as np

from zero_mpi.device.arrays import recycled
from zero_mpi.device.types import Array
from zero_mpi.ops import reference
from zero_mpi.ops.cpu.jit import FLOAT32, INTEGER, filled, given, kernel, matrix


@kernel(given(1, INTEGER), INTEGER, returns=INTEGER)
def first_outside(ids: Array, count: int) -> int:
    """Where the first id lies that is not in [0, count), or -1: kernels do not check what they index by."""
    for i in range(ids.size):
        if ids[i] < 0 or ids[i] >= count:
            return i
    return -1


@kernel(given(1, INTEGER), given(2), filled(2))
def copy_rows(ids: Array, w: Array, y: Array) -> None:
    """Copy rows: y[i] = w[ids[i]]."""
    for i in range(ids.size):
        row, out = w[ids[i]], y[i]
        for j in range(w.shape[1]):
            out[j] = row[j]


@kernel(given(1, INTEGER), given(2), filled(2))
def add_rows(ids: Array, dy: Array, dw: Array) -> None:
    """dw[ids[i]] += dy[i], one i after the other."""
    for i in range(ids.size):
        row, total = dy[i], dw[ids[i]]
        for j in range(dy.shape[1]):
            total[j] += row[j]


@kernel(given(3), filled(2))
def sum_positions(dy: Array, dw: Array) -> None:
    """dw (T, C) += dy (B, T, C), one sequence after the other."""
    for b in range(dy.shape[0]):
        for t in range(dy.shape[1]):
            for j in range(dy.shape[2]):
                dw[t, j] += dy[b, t, j]


def checked(ids: Array, count: int) -> Array:
    """Ids as a flat array of int64; raises IndexError for one that is not below `count`."""
    found = np.ascontiguousarray(ids.reshape(-1), np.int64)
    place = first_outside(found, count)
    if place >= 0:
        raise IndexError(f"token {found[place]} is not one of {count}")
    return found


def embedding(tokens: Array, w: Array) -> Array:
    """`reference.embedding`."""
    if w.dtype != FLOAT32:
        return reference.embedding(tokens, w)
    y = recycled((*tokens.shape, w.shape[1]))
    copy_rows(checked(tokens, w.shape[0]), matrix(w), matrix(y))
    return y


def embedding_backward(tokens: Array, dy: Array, dw: Array) -> None:
    """`reference.embedding_backward`; rows of one token in their order, each onto what is there."""
    if not dy.dtype == dw.dtype == FLOAT32 or not dw.flags.c_contiguous:
        reference.embedding_backward(tokens, dy, dw)
        return
    add_rows(checked(tokens, dw.shape[0]), matrix(dy), dw)


def positions(x: Array, w: Array) -> Array:
    """`reference.positions`."""
    if not x.dtype == w.dtype == FLOAT32:
        return reference.positions(x, w)
    return np.add(x, w, out=recycled(x.shape))


def positions_backward(dy: Array, dw: Array) -> None:
    """`reference.positions_backward`."""
    if not dy.dtype == dw.dtype == FLOAT32 or not dw.flags.c_contiguous:
        reference.positions_backward(dy, dw)
        return
    sum_positions(np.ascontiguousarray(dy), dw)
