"""Topology of a job: which ranks are on each node.

Traffic between nodes costs about ten times as much as traffic inside a node. So transports for several nodes
divide it among lanes: the ranks with the same position on their nodes form a lane. Lanes need equally many
ranks on every node. For sums in rank order, the ranks of each node must also be consecutive.

With ZERO_MPI_RANKS_PER_NODE=n in the environment, every n ranks count as a node, whatever the hardware. So
features for several nodes can be tried on one machine.
"""

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
    """Ranks of all nodes. members: the ranks of each node, ascending; nodes ordered by their first rank."""

    members: tuple[tuple[int, ...], ...]
    rank: int

    @cached_property  # cached: a sum needs it for each chunk, and there may be thousands of nodes
    def node(self) -> int:
        return next(number for number, ranks in enumerate(self.members) if self.rank in ranks)

    @cached_property
    def local(self) -> int:
        """Position of this rank on its node."""
        return self.members[self.node].index(self.rank)

    @property
    def nodes(self) -> int:
        return len(self.members)

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks of the first node."""
        return len(self.members[0])

    @property
    def problem(self) -> str:
        """Reason why the job cannot use lanes in rank order, or an empty text."""
        if self.nodes == 1:
            return "there is only one node"
        counts = sorted({len(ranks) for ranks in self.members})
        if len(counts) > 1:
            return f"the nodes have unequal numbers of ranks ({counts[0]} to {counts[-1]})"
        if list(chain.from_iterable(self.members)) != list(range(self.nodes * counts[0])):
            return "the ranks of a node are not consecutive (fill one node after the other)"
        return ""


def node_communicator(world: Any) -> Any:
    """Return the communicator of the ranks of `world` on this node, in the same order. Collective."""
    setting = os.environ.get(PRETEND, "")
    if setting.isdigit() and int(setting) > 0:
        return world.Split(world.Get_rank() // int(setting), world.Get_rank())
    return world.Split_type(MPI.COMM_TYPE_SHARED, world.Get_rank())


def find_topology(world: Any, node: Any) -> Topology:
    """Return the topology of `world`, where `node` is the communicator of this rank's node. Collective."""
    members = members_of(world.allgather(node.bcast(world.Get_rank()))).values()
    return Topology(tuple(map(tuple, members)), world.Get_rank())
