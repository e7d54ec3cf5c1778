"""Embeddings on a GPU: rows copied out by token; gradients of rows summed in the order of the tokens' places.

For the gradient the places are sorted by token, once, so that a token's rows are summed by one thread for
each few columns, and no two threads add to one number.
"""

from __future__ import annotations

from zero_mpi.device.types import Array
from zero_mpi.ops import reference
from zero_mpi.ops.gpu.elementwise import rows_and
from zero_mpi.ops.gpu.launch import (
    ARRAY,
    F32,
    I64,
    PACK,
    THREADS,
    at,
    by_rows,
    chosen,
    each_pair,
    each_type,
    id_bytes,
    kernel,
    packed,
    take,
    tiled,
    writable,
)
from zero_mpi.ops.gpu.sort import sort_by_bits
from zero_mpi.ops.gpu.sums import add_columns
from zero_mpi.ops.registry import implements
from zero_mpi.ops.sizes import embedding_runs

EMBEDDING = each_type("embedding.cu", "embedding", "PLPPLL")
TOKEN_KEYS = kernel("embedding.cu", "token_keys", "PLPLL")
EMBEDDING_SUMS = each_pair("embedding.cu", "embedding_sums", "PPPPLLL")
EMBEDDING_JOINS = each_type("embedding.cu", "embedding_joins", "PPPLLL")
JOIN_PACK = 4  # elements of a thread that adds up partial sums
PLACE_BITS = 32  # of a key, below those of the token


@implements(reference.embedding, ARRAY)
def embedding(tokens: Array, w: Array) -> Array:
    """Compute `reference.embedding`; a token that is not below V gives a row of NaN."""
    chosen_kernel, ids, w = chosen(EMBEDDING, "embedding", w), packed(tokens), packed(w)
    vocabulary, width = w.shape
    y = take((*tokens.shape, width), w.dtype)
    chosen_kernel(
        *tiled(ids.size, width, PACK // w.itemsize),
        (at(ids), id_bytes("embedding", ids), at(w), at(y), width, vocabulary),
    )
    return y


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
    chosen(EMBEDDING, "embedding_backward", dy), chosen(EMBEDDING, "embedding_backward", dw)
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
    return rows_and("positions", x, w, x.shape[0])


@implements(reference.positions_backward, ARRAY)
def positions_backward(dy: Array, dw: Array) -> None:
    """Compute `reference.positions_backward`; dw may have any of the types."""
    writable("positions_backward", dw)
    dy = by_rows(packed(dy).reshape(dy.shape[0], -1))[0]
    add_columns(dy, dw.reshape(-1))
