"""Sum of the squared gradient elements, in one order for all ranks, units, strategies and devices.

The terms are float64 sums over chunks of each parameter, in the model's order. The terms are added in the
order of NumPy's `sum`, which halves a vector down to leaves of at most LEAF values. A rank that has all
values of a leaf sends their sum. If several ranks have values of a leaf, they send these values. In total,
ranks send about one number per 100,000 parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import accumulate

import numpy as np

from zero_mpi import device
from zero_mpi.device.arrays import namespace
from zero_mpi.device.ordered_sum import LEAF, pairwise_sums
from zero_mpi.device.types import Array
from zero_mpi.sharding.unit import Unit


def runs_of(units: Sequence[Unit], names: Collection[str], ranks: int) -> Array:
    """Return (4, N): for each run, its start and end in the model, its start on the rank, and its rank.

    A run is a contiguous range of the model's values in a unit that one rank holds. names: the model's
    parameters in order. A rank has the values of its trained units, one unit after the other.
    """
    trained = [unit for unit in units if unit.trainable]
    chunks = Counter[str]()  # chunks of each parameter, which may be in several units
    for unit in trained:
        chunks.update({name: unit.chunks(name) for name in unit.params})
    first = dict(zip(names, accumulate((chunks[name] for name in names), initial=0), strict=False))
    runs, here = [np.zeros((4, 0), np.int64)], np.zeros(ranks, np.int64)
    for unit in trained:
        owned = -(-np.array(unit.partition(ranks).bounds) // unit.quantum)
        places = [
            (first[name] + unit.firsts.get(name, 0) // unit.quantum, offset // unit.quantum)
            for name, offset in unit.offsets.items()
        ]
        params = np.array(places).T
        shift = params[0] - params[1]
        begins = np.flatnonzero(np.diff(shift, prepend=shift[0] - 1))
        edges = np.unique([*params[1, begins], *owned])
        starts, lengths = edges[:-1], np.diff(edges)
        rank = np.searchsorted(owned, starts, "right") - 1
        there = starts + shift[begins][np.searchsorted(params[1, begins], starts, "right") - 1]
        runs.append(np.stack([there, there + lengths, starts - owned[rank] + here[rank], rank]))
        here += np.diff(owned)
    return np.concatenate(runs, 1)


class SquaresSum:
    """Sum of all values over ranks, each of which has the values of its runs."""

    def __init__(self, runs: Array, rank: int) -> None:
        cuts = np.unique(np.append(runs[:2], 0))
        starts, lengths = np.zeros(1, np.int64), cuts[-1:]
        self._levels, found = [], []
        while lengths.size:
            inner = lengths > LEAF
            self._levels.append(inner)
            found.append((starts[~inner], lengths[~inner]))
            half = lengths[inner] // 16 * 8  # NumPy's first half is a multiple of 8
            starts = np.stack([starts[inner], starts[inner] + half], 1).reshape(-1)
            lengths = np.stack([half, lengths[inner] - half], 1).reshape(-1)
        starts, lengths = map(np.concatenate, zip(*found, strict=True))
        inside = np.searchsorted(cuts, starts, "right"), np.searchsorted(cuts, starts + lengths, "left")
        self._dealt = inside[0] < inside[1]
        many = lengths[self._dealt]
        self._rest = np.stack([np.cumsum(many) - many, many])  # starts and lengths of divided leaves
        alone = np.repeat(starts[self._dealt] - self._rest[0], many) + np.arange(many.sum())
        self.size = starts.size + alone.size
        lengths = np.concatenate([lengths * ~self._dealt, np.ones_like(alone)])
        starts = np.concatenate([starts, alone])
        own = np.append([[0], [0], [0]], runs[:3, runs[3] == rank], 1)
        own = own[:, np.argsort(own[0], kind="stable")]
        first, end, at = own[:, np.searchsorted(own[0], starts, "right") - 1]
        self._places = np.flatnonzero((first <= starts) & (starts + lengths <= end) & (lengths > 0))
        segments = [x[self._places] for x in (starts - first + at, lengths)]
        self._segments = device.in_use().from_host(np.stack(segments))

    def part(self, values: Sequence[Array]) -> Array:
        """Return the vector that this rank sends: sums of its values (in order of units), zeros elsewhere."""
        sent = np.zeros(self.size)
        if self._places.size:
            joined = namespace(values[0]).concatenate(values)
            sent[self._places] = device.in_use().to_host(pairwise_sums(joined, self._segments))
        return sent

    def total(self, sent: Array) -> float:
        """Return the sum of all values, given the sum of the vectors that all ranks send."""
        end = self._dealt.size
        sent[:end][self._dealt] = pairwise_sums(sent[end:], self._rest)
        below = sent[:0]
        for inner in reversed(self._levels):
            values, leaves = np.empty(inner.size), inner.size - np.count_nonzero(inner)
            values[inner] = below[::2] + below[1::2]
            values[~inner], end = sent[end - leaves : end], end - leaves
            below = values
        return float(below[0])
