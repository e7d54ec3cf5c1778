"""Embeddings on CPUs: forward copies rows, and backward adds the gradients in the order of the tokens."""

import numpy as np

from zero_mpi.device.arrays import recycled
from zero_mpi.device.types import Array
from zero_mpi.ops import reference
from zero_mpi.ops.cpu.elementwise import add_low
from zero_mpi.ops.cpu.jit import BFLOAT16, FLOAT32, adds_into, alike, bits, flat, kernel, matrix, narrow, wide
from zero_mpi.ops.registry import definitions, implements


@kernel("i1 i i -> i")
def first_outside(ids: Array, least: int, count: int) -> int:
    """Return the index of the first id outside [least, count), or -1; kernels do not check their indices."""
    for i in range(ids.size):
        if ids[i] < least or ids[i] >= count:
            return i
    return -1


@kernel("i1 e2 e2+")
def copy_rows(ids: Array, w: Array, y: Array) -> None:
    """Copy rows: y[i] = w[ids[i]]."""
    for i in range(ids.size):
        row, out = w[ids[i]], y[i]
        for j in range(w.shape[1]):
            out[j] = row[j]


@kernel("i1 f2 f2+")
def add_rows(ids: Array, dy: Array, dw: Array) -> None:
    """Compute dw[ids[i]] += dy[i] for i = 0, 1, ... in this order."""
    for i in range(ids.size):
        row, total = dy[i], dw[ids[i]]
        for j in range(dy.shape[1]):
            total[j] += row[j]


@kernel("i1 i1 l2 e2+")
def add_sums_of_rows(ids: Array, order: Array, dy: Array, dw: Array) -> None:
    """Add dy[order[i]] to dw[ids[i]] for ascending ids; the rows of an id are summed and rounded once."""
    total = np.zeros(dy.shape[1], np.float32)
    for i in range(ids.size):
        row, out = dy[order[i]], dw[ids[i]]
        for j in range(total.size):
            total[j] += wide(row[j])
        if i + 1 == ids.size or ids[i + 1] != ids[i]:
            for j in range(total.size):
                out[j] = narrow(dw, wide(out[j]) + total[j])
            total[:] = 0


@kernel("l3 e2+")
def add_sums_of_positions(dy: Array, dw: Array) -> None:
    """Add to dw (T, C) the sum of dy (B, T, C) over sequences, rounded once."""
    total = np.zeros(dy.shape[2], np.float32)
    for t in range(dy.shape[1]):
        total[:] = 0
        for b in range(dy.shape[0]):
            row = dy[b, t]
            for j in range(total.size):
                total[j] += wide(row[j])
        out = dw[t]
        for j in range(total.size):
            out[j] = narrow(dw, wide(out[j]) + total[j])


@kernel("f3 f2+")
def sum_positions(dy: Array, dw: Array) -> None:
    """Add dy (B, T, C) to dw (T, C), one sequence after the other."""
    for b in range(dy.shape[0]):
        for t in range(dy.shape[1]):
            for j in range(dy.shape[2]):
                dw[t, j] += dy[b, t, j]


def checked(ids: Array, count: int, least: int = 0) -> Array:
    """Return ids as a flat int64 array; raise IndexError for an id outside [least, count)."""
    flat_ids = np.ascontiguousarray(ids.reshape(-1), np.int64)
    place = first_outside(flat_ids, least, count)
    if place >= 0:
        raise IndexError(f"token {flat_ids[place]} is not one of {count}")
    return flat_ids


@implements(reference.embedding)
def embedding(tokens: Array, w: Array) -> Array:
    if not alike(w):
        return reference.embedding(tokens, w)
    y = recycled((*tokens.shape, w.shape[1]), w.dtype)
    copy_rows(checked(tokens, w.shape[0]), matrix(w), matrix(y))
    return y


@implements(reference.embedding_backward)
def embedding_backward(tokens: Array, dy: Array, dw: Array) -> None:
    """Compute `reference.embedding_backward`; a token's rows are added in order (bfloat16: in float32)."""
    if dy.dtype == BFLOAT16 and adds_into(dw):
        ids = checked(tokens, dw.shape[0])
        order = np.argsort(ids, kind="stable")
        add_sums_of_rows(ids[order], order, matrix(dy), bits(dw))
    elif dy.dtype == dw.dtype == FLOAT32 and dw.flags.c_contiguous:
        add_rows(checked(tokens, dw.shape[0]), matrix(dy), dw)
    else:
        definitions.embedding_backward(tokens, dy, dw)


@implements(reference.positions)
def positions(x: Array, w: Array) -> Array:
    if not alike(x, w):
        return definitions.positions(x, w)
    y = recycled(x.shape, x.dtype)
    if x.dtype == FLOAT32:
        return np.add(x, w, out=y)
    for row, out in zip(x, y, strict=True):
        add_low(flat(row), flat(w), flat(out))
    return y


@implements(reference.positions_backward)
def positions_backward(dy: Array, dw: Array) -> None:
    if dy.dtype == BFLOAT16 and adds_into(dw):
        add_sums_of_positions(bits(np.ascontiguousarray(dy)), bits(dw))
    elif dy.dtype == dw.dtype == FLOAT32 and dw.flags.c_contiguous:
        sum_positions(np.ascontiguousarray(dy), dw)
    else:
        definitions.positions_backward(dy, dw)
