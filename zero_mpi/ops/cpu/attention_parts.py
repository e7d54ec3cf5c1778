"""Division of attention into shares of heads for threads; in bfloat16 a share is divided into tiles.

A tile is a block of rows of some heads, with the keys that these rows see. A product computes one tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import prod

import numpy as np

from zero_mpi.device.types import Array
from zero_mpi.ops import threads
from zero_mpi.ops.sizes import LONG, LOW_BLOCK, early_keys, tile_heads

NONE = np.zeros((0, 0), np.int64)


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Part of attention for one thread: rows of some sequences, for some key heads and their query heads."""

    number: int  # index of this share
    heads_before: int  # number of (sequence, query head) pairs in earlier shares
    sequences: slice  # range of sequences in the batch
    heads: slice  # range of key heads
    per_key: int  # query heads per key head
    keys: int  # total number of key heads
    rows: slice  # range of query positions

    def cut(self, *arrays: Array) -> list[Array]:
        """Return views of this share's part of arrays (B, T, query or key heads, width)."""
        return [x[self.sequences, :, self.heads_of(x.shape[2] // self.keys)] for x in arrays]

    def queries(self, *arrays: Array) -> list[Array]:
        """Return views of this share's rows of q, y, dy, dq or sums."""
        return [x[self.sequences, self.rows, self.heads_of(self.per_key)] for x in arrays]

    def keys_seen(self, offset: int, *arrays: Array) -> list[Array]:
        """Return views of the rows of k, v, dk or dv that this share sees; `offset`: position of query 0."""
        return [x[self.sequences, : offset + self.rows.stop, self.heads] for x in arrays]

    def heads_of(self, times: int) -> slice:
        """Return the slice of this share's heads in an array with `times` heads per key head."""
        return slice(self.heads.start * times, self.heads.stop * times)


def rowwise(x: Array) -> Array:
    """Return x (B, T, heads, width), or a copy, with contiguous rows of each head that do not overlap."""
    (_, down, _, right), size = x.strides, x.itemsize
    fits = right == size and down % size == 0 and down >= size * x.shape[3]
    return x if fits else np.ascontiguousarray(x)


def shares(q: Array, k: Array) -> list[HeadShare]:
    """Return one share per thread: sequences, or heads of all sequences if this keeps more threads busy."""
    (batch, length, heads, _), keys = q.shape, k.shape[2]
    size, shared = length * k.shape[1], heads // keys
    by_sequences = threads.cut((batch, heads, size))
    by_heads = threads.cut((keys, batch, shared, size))
    if busy(by_sequences) >= busy(by_heads):
        cuts = [(part.start * heads, part, slice(0, keys)) for part in by_sequences]
    else:
        cuts = [(part.start * shared * batch, slice(0, batch), part) for part in by_heads]
    return [HeadShare(number, *part, shared, keys, slice(0, length)) for number, part in enumerate(cuts)]


def units(q: Array, k: Array) -> list[list[HeadShare]]:
    """Return the shares of each thread. A share of a long sequence is half of the work of one key head."""
    (batch, length, heads, _), (total, keys) = q.shape, k.shape[1:3]
    early = early_keys(length, total) + length - total
    if length < LONG:
        return [[share] for share in shares(q, k)]
    places = [(slice(b, b + 1), slice(g, g + 1)) for b in range(batch) for g in range(keys)]
    halves = slice(0, early), slice(early, length)
    work = [HeadShare(0, 0, *place, heads // keys, keys, rows) for rows in halves for place in places]
    return [work[part] for part in threads.cut((len(work), length * total))]


def busy(parts: list[slice]) -> float:
    """Return the average number of threads that work until the largest part is done."""
    return float(parts[-1].stop / max(part.stop - part.start for part in parts))


@dataclass(frozen=True)
class Tile:
    """Block of rows of some heads, and the keys that these rows see."""

    shape: tuple[int, int, int, int]  # (sequences, heads, n, m): n query positions, m key positions
    sequences: slice  # range of sequences in the batch
    queries: slice  # range of heads of q
    keys: slice  # range of the heads of k and v that these queries use
    rows: slice  # range of query positions
    positions: slice  # range of key positions
    weights: int  # start of this tile's weights among the weights of all tiles in order
    sums: int  # start of this tile's row sums among the row sums of all tiles
    is_first: bool  # this tile is the first to add to the gradients of its keys
    is_last: bool  # this tile is the last to add to the gradients of its keys

    def of_queries(self, x: Array) -> Array:
        """Return this tile's rows of q, y or dy (B, T, H, width), as a matrix per sequence and head."""
        return x[self.sequences, self.rows, self.queries].transpose(0, 2, 1, 3)

    def of_keys(self, x: Array) -> Array:
        """Return this tile's rows of k or v (B, S, G, width), as a matrix per sequence and head."""
        return x[self.sequences, self.positions, self.keys].transpose(0, 2, 1, 3)

    def within(self, begins: Array | None) -> Tile:
        """Return the tile without the first blocks of keys that no row sees."""
        if begins is None:
            return self
        first = int(begins[self.sequences, self.rows.start].min()) // LOW_BLOCK * LOW_BLOCK
        shape = (*self.shape[:3], self.shape[3] - first)
        return replace(self, shape=shape, positions=slice(first, self.positions.stop))

    def hidden(self, begins: Array | None) -> Array:
        """Return the number of the tile's first keys that each row does not see; empty without `begins`."""
        return NONE if begins is None else begins[self.sequences, self.rows] - (self.positions.start or 0)

    def cut(self, buffer: Array, start: int = 0) -> Array:
        """Return a view of this tile's scores or weights in a buffer."""
        return buffer[start : start + prod(self.shape)].reshape(self.shape)

    def cut_sums(self, sums: Array) -> Array:
        """Return the sums of this tile's rows, (sequences, heads, n)."""
        shape = self.shape[:3]
        return sums[self.sums : self.sums + prod(shape)].reshape(shape)


@cache
def tiles(batch: int, length: int, heads: int, shared: int, total: int) -> tuple[Tile, ...]:
    """Return the tiles for `length` queries and `total` keys; `shared` query heads share a key head.

    A head's last block comes first: it sees all keys, so it writes their gradients. The other blocks, and
    then the other heads that share the keys, add to these gradients.
    """
    blocks: list[Tile] = []
    weights = sums = 0
    starts, of_keys = range(0, length, LOW_BLOCK), heads // shared
    step_b, step_g = tile_heads(batch, of_keys, length, total)
    for b, g in product(range(0, batch, step_b), range(0, of_keys, step_g)):
        sequences, keys = slice(b, min(b + step_b, batch)), slice(g, min(g + step_g, of_keys))
        count = sequences.stop - b, keys.stop - g
        for share in range(shared):
            queries = slice(keys.start * shared + share, keys.stop * shared, shared)
            for r in reversed(starts):
                n = min(LOW_BLOCK, length - r)
                m = total - length + r + n
                is_last = share == shared - 1 and r == 0
                is_first = share == 0 and r == starts[-1]
                shape = (*count, n, m)
                places = (sequences, queries, keys, slice(r, r + n), slice(m))
                blocks.append(Tile(shape, *places, weights, sums, is_first, is_last))
                weights += prod(shape)
                sums += prod(shape[:3])
    return tuple(blocks)


def tiles_for(q: Array, k: Array) -> tuple[Tile, ...]:
    (batch, length, heads, _), (total, of_keys) = q.shape, k.shape[1:3]
    return tiles(batch, length, heads, heads // of_keys, total)
