"""Embeddings on a GPU: forward copies rows; backward sums gradients in the order of the tokens' positions.

Backward sorts the positions by token and cuts them into runs. A thread sums a few columns of a run. If a
token is in several runs, a second kernel adds their sums. No two threads add to the same number.
"""

from itertools import product

import numpy as np

from zero_mpi.device.types import Array
from zero_mpi.ops import reference
from zero_mpi.ops.gpu.elementwise import ADD_ROW
from zero_mpi.ops.gpu.launch import ARRAY, F32, TYPES, Family, Kernel, by_pairs, packed, take, tiled, writable
from zero_mpi.ops.gpu.sums import add_columns
from zero_mpi.ops.registry import implements
from zero_mpi.ops.sizes import PACK, THREADS, embedding_runs

EMBEDDING = Family("embedding.cu", "embedding", "PLPPLL")
TOKEN_KEYS = Kernel("embedding.cu", "token_keys", "PLPLL")
EMBEDDING_SUMS = by_pairs("embedding.cu", "embedding_sums", "PPPPLLL", product(TYPES, TYPES))
EMBEDDING_JOINS = Family("embedding.cu", "embedding_joins", "PPPLLL")
JOIN_PACK = 4  # elements per thread in the kernel that adds up partial sums
PLACE_BITS = 32  # the low bits of a key are the position, the bits above the token
# CuPy's sort waits for the GPU and allocates memory. Our sort is fast for tens of thousands of keys.
DIGIT_COUNTS = Kernel("sort.cu", "digit_counts", "PPLL")
COUNTS_BEFORE = Kernel("sort.cu", "counts_before", "PL")
BY_DIGIT = Kernel("sort.cu", "by_digit", "PPPLL")
BITS = 8  # bits of a digit: a digit has as many values as a block has threads
THREADS_OF_A_SUM = 1024


@implements(reference.embedding, ARRAY)
def embedding(tokens: Array, w: Array) -> Array:
    """Compute `reference.embedding`. A token outside [0, V) gives a row of NaN."""
    kernel, ids, w, (vocabulary, width) = EMBEDDING[w.dtype], packed(tokens), packed(w), w.shape
    y = take((*tokens.shape, width), w.dtype)
    grid = tiled(ids.size, width, PACK // w.itemsize)
    kernel(*grid, (ids, ids.itemsize, w, y, width, vocabulary))
    return y


def sorted_places(tokens: Array, vocabulary: int) -> Array:
    """Return sorted keys token * 2^32 + position; an invalid token counts as V."""
    ids, size = packed(tokens), int(tokens.size)
    if size >= 1 << PLACE_BITS:
        raise ValueError(f"embedding_backward: expected fewer than {1 << PLACE_BITS} tokens; got {size}")
    keys, spare = take((size,), np.int64), take((size,), np.int64)
    blocks = -(-size // THREADS)
    counts = take((blocks << BITS,), np.uint32)
    TOKEN_KEYS(blocks, THREADS, (ids, ids.itemsize, keys, size, vocabulary))
    # Stable radix sort, from the token's lowest digit on; the positions are already in order.
    for shift in range(PLACE_BITS, PLACE_BITS + vocabulary.bit_length(), BITS):
        DIGIT_COUNTS(blocks, THREADS, (keys, counts, size, shift))
        COUNTS_BEFORE(1, THREADS_OF_A_SUM, (counts, int(counts.size)))
        BY_DIGIT(blocks, THREADS, (keys, spare, counts, size, shift))
        keys, spare = spare, keys
    return keys


@implements(reference.embedding_backward, ARRAY)
def embedding_backward(tokens: Array, dy: Array, dw: Array) -> None:
    """Compute `reference.embedding_backward`; dw: float32, bf16 or fp16. Invalid tokens are ignored."""
    EMBEDDING[dy.dtype], EMBEDDING[dw.dtype]
    writable("embedding_backward", dw)
    dy, size, (vocabulary, width) = packed(dy), tokens.size, dw.shape
    if not size:
        return
    keys, runs, rest = sorted_places(tokens, vocabulary), embedding_runs(size), (size, width, vocabulary)
    partial = take((2 * runs, width), F32)
    grid = tiled(runs, width, PACK // dy.itemsize)
    EMBEDDING_SUMS[dy.dtype, dw.dtype](*grid, (keys, dy, dw, partial, *rest))
    EMBEDDING_JOINS[dw.dtype](*tiled(runs, width, JOIN_PACK), (keys, dw, partial, *rest))


@implements(reference.positions, ARRAY)
def positions(x: Array, w: Array) -> Array:
    kernel, x, w = ADD_ROW[x.dtype], packed(x), packed(w)
    y, width = take(x.shape, x.dtype), int(w.size)
    kernel(*tiled(x.shape[0], width, PACK // x.itemsize), (x, w, 0, y, width, width, 0, width))
    return y


@implements(reference.positions_backward, ARRAY)
def positions_backward(dy: Array, dw: Array) -> None:
    """Compute `reference.positions_backward`; dw may have any of the three types."""
    writable("positions_backward", dw)
    add_columns(packed(dy).reshape(dy.shape[0], -1), dw.reshape(-1))
