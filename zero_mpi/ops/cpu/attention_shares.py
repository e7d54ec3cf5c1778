"""Division of attention among the threads of a rank: each does all of it for some heads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zero_mpi.device.types import Array
from zero_mpi.ops import threads

ALL = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class HeadShare:
    """One thread's share of attention: some sequences, and of them some heads of keys with their queries.

    number      of this share
    before      pairs of a sequence and a head of queries in earlier shares
    sequences   slice of the batch
    heads       slice of the heads of keys
    shared      heads of queries per head of keys
    keys        total heads of keys
    """

    number: int
    before: int
    sequences: slice
    heads: slice
    shared: int
    keys: int

    def cut(self, *arrays: Array) -> list[Array]:
        """Return its part of arrays (B, T, heads of queries or of keys, width), as views."""
        return [x[self.sequences, :, self.of(x.shape[2] // self.keys)] for x in arrays]

    def begins(self, begins: Array | None) -> Array:
        """Return the first position that each of its positions sees, sequence by sequence; empty: all."""
        return ALL if begins is None else np.ascontiguousarray(begins[self.sequences]).reshape(-1)

    def of(self, times: int) -> slice:
        """Return the slice of its heads in an array with `times` heads per head of keys."""
        return slice(self.heads.start * times, self.heads.stop * times)


def shares(q: Array, k: Array) -> list[HeadShare]:
    """Return each thread's share: full sequences, or if that would leave threads idle, heads of all."""
    (batch, length, heads, _), keys = q.shape, k.shape[2]
    size, shared = length * k.shape[1], heads // keys
    by_sequences = threads.cut((batch, heads, size))
    by_heads = threads.cut((keys, batch, shared, size))
    if busy(by_sequences) >= busy(by_heads):
        before = [part.start * heads for part in by_sequences]
        both = [(part, slice(0, keys)) for part in by_sequences]
    else:
        before = [part.start * shared * batch for part in by_heads]
        both = [(slice(0, batch), part) for part in by_heads]
    return [HeadShare(number, before[number], *part, shared, keys) for number, part in enumerate(both)]


def busy(parts: list[slice]) -> float:
    """Return the average number of busy threads until the one with the largest part is done."""
    return float(parts[-1].stop / max(part.stop - part.start for part in parts))
