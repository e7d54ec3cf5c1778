"""Formulas for the bytes that ranks send to each other in a step, within and between nodes.

A rank gathers a unit as often as the schedule does (`gathers_of`), and sends its gradients to the owners once
per round, or once per step in an all-reduce. In exact reductions, ranks without a micro-batch send none.
Ranks also send two short float64 vectors: the losses of the micro-batches and the sums of the gradient's
squares. Traffic between nodes has its own formulas (`comm.nodes`).

`Meter.sent_bytes` counts the same bytes, whatever the library's algorithm. Results are arrays over ranks.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zero_mpi.comm import Partition
from zero_mpi.device.types import Array
from zero_mpi.plan.case import Case
from zero_mpi.plan.rank_memory import NUMBER
from zero_mpi.sharding.actions import Gather

Sent = tuple[Array, Array]  # int64 elements that each rank sends inside its node, and to other nodes
FLAGS = 3  # numbers that `train` sends with the losses: stop requests, failures of saves, requests to save


class Route:
    """Route of direct messages: each slice is sent to every rank, or to its owner.

    There are `ranks` ranks, `per_node` on each node except maybe the last.
    all_give      ranks without a micro-batch also send gradients, which are zeros
    passes_sums   nodes send each other float32 sums, not gradients
    """

    passes_sums = False

    def __init__(self, ranks: int, per_node: int, all_give: bool = False) -> None:
        self.ranks, self.per_node, self.all_give = ranks, per_node, all_give
        self.nodes = -(-ranks // per_node)
        self.rank = np.arange(ranks)
        self.node, self.local = self.rank // per_node, self.rank % per_node
        self.mates = np.bincount(self.node)[self.node] - 1  # number of other ranks on the same node

    def owned(self, partition: Partition) -> Array:
        return np.array(partition.counts, np.int64)

    def gathered(self, partition: Partition) -> Sent:
        counts = self.owned(partition)
        return counts * self.mates, counts * (self.ranks - 1 - self.mates)

    def reduced(self, partition: Partition, contributors: int, first: bool) -> Sent:
        """Return the elements that each rank sends in a reduction; `first`: True in a step's first round."""
        counts = self.owned(partition)
        on_node = np.bincount(self.node, counts).astype(np.int64)[self.node]
        senders = (self.rank < contributors) | self.all_give
        return (on_node - counts) * senders, (partition.length - on_node) * senders


class Lanes(Route):
    """Route of lanes: ranks with the same position on their nodes send slices between nodes (comm.nodes).

    A sum passes from node to node up to the last active node, then to its owner. If it adds to an earlier
    round's sum, its owner first sends the earlier sum to the first node.
    """

    passes_sums = True

    def gathered(self, partition: Partition) -> Sent:
        counts = self.owned(partition)
        return 0 * counts, counts * (self.nodes - 1)

    def reduced(self, partition: Partition, contributors: int, first: bool) -> Sent:
        counts = self.owned(partition)
        lane = np.bincount(self.local, counts).astype(np.int64)[self.local]
        last = (contributors - 1) // self.per_node
        inside = (partition.length - lane) * (self.rank < contributors)
        forward = np.where(self.node < last, lane, np.where(self.node == last, lane - counts, 0))
        return inside, forward + counts * ((self.node > 0) & (not first))


class ByNode(Route):
    """Route if every node has all slices, partitioned over the node's ranks (comm.nodes.hybrid).

    A sum passes from node to node to the last active node, then to all nodes. `shared`: see Case.shares_full.
    """

    passes_sums = True

    def __init__(self, ranks: int, per_node: int, shared: bool) -> None:
        super().__init__(ranks, per_node)
        self.shared = shared

    def owned(self, partition: Partition) -> Array:
        return np.array(partition.counts, np.int64)[self.local]

    def gathered(self, partition: Partition) -> Sent:
        counts = self.owned(partition)
        return counts * (0 if self.shared else self.per_node - 1), 0 * counts

    def reduced(self, partition: Partition, contributors: int, first: bool) -> Sent:
        counts = self.owned(partition)
        last = (contributors - 1) // self.per_node
        neighbours = (self.node > 0).astype(np.int64) + (self.node < self.nodes - 1)
        inside = (partition.length - counts) * (self.rank < contributors)
        return inside, counts * ((self.node < last) + neighbours - (self.node != last))


def routes_of(case: Case) -> tuple[Route, Route]:
    """Return the routes of gathers and reductions; over NODES, replicated parameters use direct messages."""
    if case.hybrid:
        by_node = ByNode(case.ranks, case.per_node, case.shares_full)
        return by_node, by_node
    direct = Route(case.ranks, case.per_node, not case.exact)
    if not case.passes_sums:
        return direct, direct
    lanes = Lanes(case.ranks, case.per_node)
    return lanes if case.strategy.shards_parameters else direct, lanes


@dataclass(frozen=True)
class Traffic:
    """Bytes sent in a step, as arrays (ranks,)."""

    parameters_inside: Array
    parameters_between: Array
    gradients_inside: Array
    gradients_between: Array
    vectors: Array  # losses and sums of squares

    @property
    def sent(self) -> Array:
        """Bytes sent by each rank. Rank 0's number is `sent_bytes` in metrics.jsonl."""
        return self.inside + self.between + self.vectors

    @property
    def inside(self) -> Array:
        return self.parameters_inside + self.gradients_inside

    @property
    def between(self) -> Array:
        return self.parameters_between + self.gradients_between


def plan_traffic(case: Case, flags: int = FLAGS) -> Traffic:
    """Return the traffic of a step; `flags`: number of values that are sent with the losses."""
    gather_route, reduce_route = routes_of(case)
    width = case.sum_bytes if reduce_route.passes_sums else case.reduce_bytes
    widths = np.array([[case.reduce_bytes], [width]])
    rounds = case.rounds
    kinds = Counter((rounds.contributors(number), number == 0) for number in range(len(rounds)))
    parameters, gradients = np.zeros((2, case.ranks), np.int64), np.zeros((2, case.ranks), np.int64)
    gathers = gathers_of(case)
    for number, (unit, partition) in enumerate(zip(case.layout.units, case.partitions, strict=True)):
        gathered = np.stack(gather_route.gathered(partition))
        parameters += case.kept_bytes(number) * gathers[number] * gathered
        if unit.trainable and case.allreduces:
            gradients[int(case.nodes > 1)] += case.reduce_bytes * partition.length
        elif unit.trainable:
            if not case.strategy.shards_moments and not case.shares_full:
                # Each rank updates the full unit, so the float32 sums and Muon's directions are gathered.
                gradients += case.sum_bytes * gathered * (1 + unit.full_matrices)
            for kind, count in kinds.items():
                gradients += widths * count * np.stack(reduce_route.reduced(partition, *kind))
    sums = case.log_probabilities * (1 + len(case.scoring_passes))
    losses = (rounds.micro_batches + flags + sums) * (case.ranks > 1)  # summed over all ranks
    vectors = NUMBER * (losses + case.squares * (case.owners > 1))  # squares are summed over the owners
    (a, b), (c, d) = parameters, gradients
    return Traffic(a, b, c, d, np.full(case.ranks, vectors, np.int64))


def gathers_of(case: Case) -> Sequence[int]:
    """Return how often each unit's parameters are gathered in a step; shared memory needs no gathers."""
    units = case.layout.units
    if case.shares_full or not case.strategy.shards_moments:
        return [0] * len(units)
    if not case.strategy.shards_parameters:
        return [int(unit.trainable) for unit in units]  # gathered once, after the update
    schedule = case.layout.schedule
    passes = [schedule.training, *[schedule.evaluation] * len(case.scoring_passes)]
    started = Counter(action.unit for actions in passes for action in actions if isinstance(action, Gather))
    return [started[number] * len(case.rounds) for number in range(len(units))]
