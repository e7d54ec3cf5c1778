"""Embeddings on a GPU: rows copied out by token; gradients of rows summed in the order of the tokens' places.

For the gradient the places are sorted by token, once, so that a token's rows are summed by one thread for
each few columns, and no two threads add to one number.
"""

from __future__ import annotations

import numpy as np

from zero_mpi.device.types import Array
from zero_mpi.ops import reference
from zero_mpi.ops.gpu.elementwise import ADD_ROW
from zero_mpi.ops.gpu.launch import (
    ARRAY,
    F32,
    I64,
    PACK,
    THREADS,
    Family,
    Kernel,
    at,
    each_pair,
    id_bytes,
    packed,
    take,
    tiled,
    writable,
)
from zero_mpi.ops.gpu.sums import add_columns
from zero_mpi.ops.registry import implements
from zero_mpi.ops.sizes import embedding_runs

EMBEDDING = Family("embedding.cu", "embedding", "PLPPLL")
TOKEN_KEYS = Kernel("embedding.cu", "token_keys", "PLPLL")
EMBEDDING_SUMS = each_pair("embedding.cu", "embedding_sums", "PPPPLLL")
EMBEDDING_JOINS = Family("embedding.cu", "embedding_joins", "PPPLLL")
JOIN_PACK = 4  # elements of a thread that adds up partial sums
PLACE_BITS = 32  # low bits of a key; those of the token lie above
# CuPy's sort waits for the GPU and takes memory of its own; this one is for tens of thousands of keys.
DIGIT_COUNTS = Kernel("sort.cu", "digit_counts", "PPLL")
COUNTS_BEFORE = Kernel("sort.cu", "counts_before", "PL")
BY_DIGIT = Kernel("sort.cu", "by_digit", "PPPLL")
BITS = 8  # bits of a digit: there are as many digits as a block has threads
THREADS_OF_A_SUM = 1024


@implements(reference.embedding, ARRAY)
def embedding(tokens: Array, w: Array) -> Array:
    """Compute `reference.embedding`; a token that is not below V gives a row of NaN."""
    chosen_kernel, ids, w = EMBEDDING[w.dtype], packed(tokens), packed(w)
    vocabulary, width = w.shape
    y = take((*tokens.shape, width), w.dtype)
    chosen_kernel(
        *tiled(ids.size, width, PACK // w.itemsize),
        (at(ids), id_bytes("embedding", ids), at(w), at(y), width, vocabulary),
    )
    return y


def sort_by_bits(keys: Array, first: int, last: int) -> Array:
    """Return keys (n,) of 64 bits ordered by their bits [first, last); keys equal there stay in order.

    The array given is used as scratch space: use the result instead.
    """
    size, other = int(keys.size), take(keys.shape, keys.dtype)
    blocks = -(-size // THREADS)
    counts = take((blocks << BITS,), np.uint32)
    for shift in range(first, last, BITS):
        DIGIT_COUNTS(blocks, THREADS, (at(keys), at(counts), size, shift))
        COUNTS_BEFORE(1, THREADS_OF_A_SUM, (at(counts), int(counts.size)))
        BY_DIGIT(blocks, THREADS, (at(keys), at(other), at(counts), size, shift))
        keys, other = other, keys
    return keys


def sorted_places(tokens: Array, vocabulary: int) -> Array:
    """Return keys token * 2^32 + place, in order; an invalid token counts as V."""
    ids = packed(tokens)
    if ids.size >= 1 << PLACE_BITS:
        raise ValueError(f"embedding_backward: expected fewer than {1 << PLACE_BITS} tokens; got {ids.size}")
    keys = take((ids.size,), I64)
    TOKEN_KEYS(
        -(-ids.size // THREADS),
        THREADS,
        (at(ids), id_bytes("embedding_backward", ids), at(keys), ids.size, vocabulary),
    )
    return sort_by_bits(keys, PLACE_BITS, PLACE_BITS + vocabulary.bit_length())


@implements(reference.embedding_backward, ARRAY)
def embedding_backward(tokens: Array, dy: Array, dw: Array) -> None:
    """Compute `reference.embedding_backward`; dw may have any of the types. Tokens from V on are ignored."""
    EMBEDDING[dy.dtype], EMBEDDING[dw.dtype]
    writable("embedding_backward", dw)
    dy, size, (vocabulary, width) = packed(dy), tokens.size, dw.shape
    if not size:
        return
    keys, runs = sorted_places(tokens, vocabulary), embedding_runs(size)
    partial = take((2 * runs, width), F32)
    EMBEDDING_SUMS[dy.dtype, dw.dtype](
        *tiled(runs, width, PACK // dy.itemsize),
        (at(keys), at(dy), at(dw), at(partial), size, width, vocabulary),
    )
    EMBEDDING_JOINS[dw.dtype](
        *tiled(runs, width, JOIN_PACK), (at(keys), at(dw), at(partial), size, width, vocabulary)
    )


@implements(reference.positions, ARRAY)
def positions(x: Array, w: Array) -> Array:
    kernel, x, w = ADD_ROW[x.dtype], packed(x), packed(w)
    y, width = take(x.shape, x.dtype), int(w.size)
    kernel(*tiled(x.shape[0], width, PACK // x.itemsize), (at(x), at(w), 0, at(y), width, width, 0, width))
    return y


@implements(reference.positions_backward, ARRAY)
def positions_backward(dy: Array, dw: Array) -> None:
    """Compute `reference.positions_backward`; dw may have any of the types."""
    writable("positions_backward", dw)
    add_columns(packed(dy).reshape(dy.shape[0], -1), dw.reshape(-1))
