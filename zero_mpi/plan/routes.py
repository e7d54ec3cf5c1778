"""What each rank gives away in a gather and in a reduction of a unit, by the route that they take.

A route has two vectors over ranks: elements that go to ranks of the same node, and to those of other nodes.
They count as the transports do: what a rank lets others read where memory is shared is given away, too, but
there a gather is free.
"""

from __future__ import annotations

import numpy as np

from zero_mpi.comm import Partition
from zero_mpi.device.types import Array
from zero_mpi.plan.case import Case

Given = tuple[Array, Array]  # (inside, between), int64 elements of each rank


class Route:
    """Each slice straight to every rank, or to its owner.

    Ranks 0 ... ranks - 1, `per_node` of them on each node but the last.
    all_give      ranks with only zeros give these as well
    passes_sums   what goes between nodes in a reduction are sums, float32 always, and not gradients
    """

    passes_sums = False

    def __init__(self, ranks: int, per_node: int, all_give: bool = False) -> None:
        self.ranks, self.per_node, self.all_give = ranks, per_node, all_give
        self.nodes = -(-ranks // per_node)
        self.rank = np.arange(ranks)
        self.node, self.local = self.rank // per_node, self.rank % per_node
        self.mates = np.bincount(self.node)[self.node] - 1  # others on the same node

    def gathered(self, partition: Partition) -> Given:
        """Of one gather."""
        own = np.array(partition.counts, np.int64)
        return own * self.mates, own * (self.ranks - 1 - self.mates)

    def reduced(self, partition: Partition, contributors: int, first: bool) -> Given:
        """Of one reduction, to which so many ranks give something; `first` of its step."""
        own = np.array(partition.counts, np.int64)
        on_node = np.bincount(self.node, own).astype(np.int64)[self.node]
        gives = (self.rank < contributors) | self.all_give
        return (on_node - own) * gives, (partition.length - on_node) * gives


class Lanes(Route):
    """Ranks of one position on their nodes carry what goes between nodes, their own slices (comm.nodes)."""

    passes_sums = True

    def gathered(self, partition: Partition) -> Given:
        own = np.array(partition.counts, np.int64)
        return 0 * own, own * (self.nodes - 1)

    def reduced(self, partition: Partition, contributors: int, first: bool) -> Given:
        """A sum goes from node to node up to the last that gives, and from there to its owner.

        Where it goes on from an earlier round, it comes from its owner to the first node first.
        """
        own = np.array(partition.counts, np.int64)
        carried = np.bincount(self.local, own).astype(np.int64)[self.local]
        last = (contributors - 1) // self.per_node
        inside = (partition.length - carried) * (self.rank < contributors)
        forward = np.where(self.node < last, carried, np.where(self.node == last, carried - own, 0))
        return inside, forward + own * ((self.node > 0) & (not first))


class ByNode(Route):
    """Every node has all slices; partitions are over a node's ranks (comm.nodes.hybrid)."""

    passes_sums = True

    def __init__(self, ranks: int, per_node: int, shared: bool) -> None:
        super().__init__(ranks, per_node)
        self.shared = shared

    def gathered(self, partition: Partition) -> Given:
        own = np.array(partition.counts, np.int64)[self.local]
        return own * (0 if self.shared else self.per_node - 1), 0 * own

    def reduced(self, partition: Partition, contributors: int, first: bool) -> Given:
        """A sum goes forward from node to node up to the last that gives, and back to all."""
        own = np.array(partition.counts, np.int64)[self.local]
        last = (contributors - 1) // self.per_node
        neighbours = (self.node > 0).astype(np.int64) + (self.node < self.nodes - 1)
        inside = (partition.length - own) * (self.rank < contributors)
        return inside, own * ((self.node < last) + neighbours - (self.node != last))


def routes_of(case: Case) -> tuple[Route, Route]:
    """Of gathers and of reductions; over NODES what is kept whole is gathered straight."""
    if case.hybrid:
        by_node = ByNode(case.ranks, case.per_node, case.shares_wholes)
        return by_node, by_node
    direct = Route(case.ranks, case.per_node, not case.exact)
    if not case.passes_sums:
        return direct, direct
    lanes = Lanes(case.ranks, case.per_node)
    return lanes if case.strategy.shards_parameters else direct, lanes
