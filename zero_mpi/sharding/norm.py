"""Sum of the squared gradient elements, in one order for all ranks, units, strategies and devices.

The terms are float64 sums over chunks of each parameter, in the model's order. The terms are added in the
order of NumPy's `sum`, which halves a vector down to leaves of at most LEAF values. A rank that has all
values of a leaf sends their sum. If several ranks have values of a leaf, they send these values. In total,
ranks send about one number per 100,000 parameters.
"""

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
    runs, counts = [np.zeros((4, 0), np.int64)], np.zeros(ranks, np.int64)
    for unit in trained:
        bounds = -(-np.array(unit.partition(ranks).bounds) // unit.quantum)
        offsets = np.array([*unit.offsets.values()]) // unit.quantum
        shift = [first[name] + unit.firsts.get(name, 0) // unit.quantum for name in unit.params] - offsets
        begins = np.flatnonzero(np.diff(shift, prepend=shift[0] - 1))
        edges = np.unique([*offsets[begins], *bounds])
        starts, lengths = edges[:-1], np.diff(edges)
        rank = np.searchsorted(bounds, starts, "right") - 1
        positions = starts + shift[begins][np.searchsorted(offsets[begins], starts, "right") - 1]
        runs.append(np.stack([positions, positions + lengths, starts - bounds[rank] + counts[rank], rank]))
        counts += np.diff(bounds)
    return np.concatenate(runs, 1)


def tree_of(count: int) -> tuple[list[Array], Array]:
    """Return the halving of `count` values: a mask of inner nodes per level; starts and lengths of leaves."""
    levels, leaves, nodes = list[Array](), list[Array](), np.array([[0], [count]])
    while nodes.size:
        inner = nodes[1] > LEAF
        levels.append(inner)
        leaves.append(nodes[:, ~inner])
        starts, lengths = nodes[:, inner]
        half = lengths // 16 * 8  # NumPy's first half is a multiple of 8
        nodes = np.stack([[starts, half], [starts + half, lengths - half]], 2).reshape(2, -1)
    return levels, np.concatenate(leaves, 1)


class SquaresSum:
    """Sum of all values over ranks. A vector has an element per leaf, then the values of divided leaves."""

    def __init__(self, runs: Array, rank: int) -> None:
        edges = np.unique(np.append(runs[:2], 0))
        self._levels, (starts, lengths) = tree_of(edges[-1])
        self._divided = np.searchsorted(edges, starts, "right") < np.searchsorted(edges, starts + lengths)
        sizes = lengths[self._divided]
        self._ranges = np.stack([np.cumsum(sizes) - sizes, sizes])  # range of each divided leaf's values
        indices = np.repeat(starts[self._divided] - self._ranges[0], sizes) + np.arange(sizes.sum())
        starts = np.append(starts, indices)
        lengths = np.append(lengths * ~self._divided, np.ones_like(indices))
        self.size = starts.size
        local = np.append([[0], [0], [0]], runs[:3, runs[3] == rank], 1)
        local = local[:, np.argsort(local[0], kind="stable")]
        first, end, offset = local[:, np.searchsorted(local[0], starts, "right") - 1]
        self._places = np.flatnonzero((first <= starts) & (starts + lengths <= end) & (lengths > 0))
        segments = [(starts - first + offset)[self._places], lengths[self._places]]
        self._segments = device.in_use().from_host(np.stack(segments))  # in C order, as the kernel reads it

    def part(self, values: Sequence[Array]) -> Array:
        """Return the vector that this rank sends: sums of its values (in order of units), zeros elsewhere."""
        vector = np.zeros(self.size)
        if self._places.size:
            array = namespace(values[0]).concatenate(values)
            vector[self._places] = device.in_use().to_host(pairwise_sums(array, self._segments))
        return vector

    def total(self, vector: Array) -> float:
        """Return the sum of all values, given the sum of the vectors that all ranks send."""
        end = self._divided.size
        vector[:end][self._divided] = pairwise_sums(vector[end:], self._ranges)
        sums = vector[:0]
        for inner in reversed(self._levels):
            values, leaves = np.empty(inner.size), inner.size - np.count_nonzero(inner)
            values[inner] = sums[::2] + sums[1::2]
            values[~inner], end = vector[end - leaves : end], end - leaves
            sums = values
        return float(sums[0])
