"""Topology of a job: the ranks of each node.

Traffic between nodes costs ten times that inside a node, so the transports that know several nodes let ranks
of the same position on their nodes carry it, each its share: such ranks form a lane. That needs nodes with
equally many ranks; and where sums pass from node to node in rank order, each node's ranks must follow
one another.

With ZERO_MPI_RANKS_PER_NODE=n in the environment every n ranks count as a node of their own, whatever the
hardware: for trying out on one machine what is meant for several.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from zero_mpi.comm.base import members_of
from zero_mpi.comm.start_mpi import MPI

PRETEND = "ZERO_MPI_RANKS_PER_NODE"


@dataclass(frozen=True)
class Topology:
    """Ranks of all nodes. members: those of each node, ascending; nodes in the order of their first ranks."""

    members: tuple[tuple[int, ...], ...]
    rank: int

    @cached_property  # found once: a sum asks with each of its chunks, and nodes may be thousands
    def node(self) -> int:
        """The number of this rank's node."""
        return next(number for number, ranks in enumerate(self.members) if self.rank in ranks)

    @cached_property
    def local(self) -> int:
        """This rank's position on its node."""
        return self.members[self.node].index(self.rank)

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return len(self.members)

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks of the first node."""
        return len(self.members[0])

    @property
    def problem(self) -> str:
        """The reason why no lanes can be formed that keep the order of ranks, or an empty text."""
        if self.nodes == 1:
            return "there is only one node"
        counts = sorted({len(ranks) for ranks in self.members})
        if len(counts) > 1:
            return f"the nodes have unequal numbers of ranks ({counts[0]} to {counts[-1]})"
        if list(chain.from_iterable(self.members)) != list(range(self.nodes * counts[0])):
            return "the ranks of a node are not consecutive (fill one node after the other)"
        return ""


def node_communicator(world: Any) -> Any:
    """Return the ranks of `world` that share this one's memory, in the same order. Collective."""
    pretended = os.environ.get(PRETEND, "")
    if pretended.isdigit() and int(pretended) > 0:
        return world.Split(world.Get_rank() // int(pretended), world.Get_rank())
    return world.Split_type(MPI.COMM_TYPE_SHARED, world.Get_rank())


def find_topology(world: Any, node: Any) -> Topology:
    """Return the nodes of `world`, of which `node` is this rank's communicator. Collective."""
    leader = node.bcast(world.Get_rank())
    members = members_of(world.allgather(leader)).values()
    return Topology(tuple(map(tuple, members)), world.Get_rank())


def nodes_of(world: Any) -> list[int]:
    """Return the node of each rank of `world`, by number. Collective."""
    node = node_communicator(world)
    members = find_topology(world, node).members
    node.Free()
    return [number for _, number in sorted((rank, n) for n, ranks in enumerate(members) for rank in ranks)]
