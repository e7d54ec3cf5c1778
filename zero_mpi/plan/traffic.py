"""Bytes that ranks give to each other in a step, in a node and between nodes, by formulas.

P ranks, R rounds of micro-batches in a step. L_u is the length of unit u with its gaps and s_u the slice of
the rank in question, both in elements of 4 bytes (of blocks of a file, in words of as many).
A rank sends, per step:

- full-shard: R (P - 1) sum of g_u s_u for parameters, R sum of (L_u - s_u) for gradients;
- shard-grad-op: (P - 1) sum of s_u for parameters, once after the update; gradients as above;
- no-shard, exact: R sum of (L_u - s_u) + (P - 1) sum of s_u, all of it gradients;
- no-shard, fast: one allreduce of every L_u.

g_u is the number of gathers in a round: 1 for the units of the last stage, for a unit that distant stages
share, and for one whose backward does not read weights (embedding, learned positions); 2 for all others. In a
round with fewer micro-batches than ranks, a rank without one sends no gradients. Beside this travel two short
float64 vectors: the losses of the micro-batches and the sums of squares of the gradient's chunks. Between
nodes other formulas hold (`comm.nodes`).

All this is what `Meter.sent_bytes` counts: a slice that a rank owns goes to every other rank when it is
gathered, and a slice that it computed goes to its owner when it is reduced. Which way they take is the
library's affair: in a ring a slice passes each link once. All are vectors over ranks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from zero_mpi.comm import Partition
from zero_mpi.device.types import Array
from zero_mpi.plan.case import Case
from zero_mpi.plan.rank_memory import NUMBER
from zero_mpi.plan.routes import Route, routes_of
from zero_mpi.sharding.actions import Gather
from zero_mpi.sharding.unit import BYTES

FLAGS = 3  # numbers that `train` adds to the losses: whether to stop, whether a save failed, whether to save


@dataclass(frozen=True)
class Traffic:
    """Bytes given away in a step, for each rank: (ranks,) each."""

    parameters_inside: Array
    parameters_between: Array
    gradients_inside: Array
    gradients_between: Array
    vectors: Array  # losses and sums of squares

    @property
    def sent(self) -> Array:
        """By each rank: `sent_bytes` of metrics.jsonl on rank 0."""
        return self.inside + self.between + self.vectors

    @property
    def inside(self) -> Array:
        """To ranks of the same node."""
        return self.parameters_inside + self.gradients_inside

    @property
    def between(self) -> Array:
        """To ranks of other nodes."""
        return self.parameters_between + self.gradients_between


def plan_traffic(case: Case, flags: int = FLAGS) -> Traffic:
    """The traffic of a step; `flags` numbers travel with the losses."""
    gathering, reducing = routes_of(case)
    between = BYTES if reducing.passes_sums else case.reduce_bytes
    reduced = np.array([[case.reduce_bytes], [between]])
    parameters, gradients = np.zeros((2, case.ranks), np.int64), np.zeros((2, case.ranks), np.int64)
    for number, (unit, partition) in enumerate(zip(case.layout.units, case.partitions, strict=True)):
        gathered = np.stack(gathering.gathered(partition))
        parameters += case.kept_bytes(number) * gathers_of(case, number) * gathered
        if unit.trainable and case.allreduces:
            gradients[int(case.nodes > 1)] += case.reduce_bytes * partition.length
        elif unit.trainable:
            if not case.strategy.shards_moments and not case.shares_wholes:
                gradients += BYTES * gathered * (1 + unit.whole)  # directions of Muon follow them
                # each rank updates all of it, from sums: float32 always
            gradients += reduced * reductions(case, reducing, partition)
    losses = (case.rounds.micro_batches + flags) * (case.ranks > 1)  # over all ranks
    vectors = NUMBER * (losses + case.chunks * (case.owners > 1))  # squares over owners of slices
    (a, b), (c, d) = parameters, gradients
    return Traffic(a, b, c, d, np.full(case.ranks, vectors, np.int64))


def reductions(case: Case, route: Route, partition: Partition) -> Array:
    """Elements (inside, between) of all reductions of a unit in a step: (2, ranks)."""
    rounds = case.rounds
    kinds = Counter((rounds.contributors(number), number == 0) for number in range(len(rounds)))
    return sum(count * np.stack(route.reduced(partition, *kind)) for kind, count in kinds.items())


def gathers_of(case: Case, unit: int) -> int:
    """How often a unit's parameters are gathered in a step; shared memory need not."""
    if case.shares_wholes or not case.strategy.shards_moments:
        return 0
    if not case.strategy.shards_parameters:
        return int(case.layout.units[unit].trainable)  # once, after the update
    started = [action.unit for action in case.layout.schedule.training if isinstance(action, Gather)]
    return started.count(unit) * len(case.rounds)  # g_u a round
