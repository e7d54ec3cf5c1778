"""The ranks of the job and the hosts they are on, as every concern needs them.

A node is a group of ranks that share memory, as the transports find it (`comm.topology`); a host's name is
only for people. Two nodes of one name are told apart by a number.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from zero_mpi.comm import Comm, SerialComm
from zero_mpi.launch.world import World

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """All ranks. `nodes`: the ranks of each, those of the first rank first; `names`: one for each node."""

    world: World
    comm: Comm
    node_comm: Any  # the raw communicator of this rank's node; None without MPI
    nodes: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]

    @property
    def rank(self) -> int:
        """This rank."""
        return self.world.rank

    @property
    def size(self) -> int:
        """How many there are."""
        return self.world.size

    @property
    def node(self) -> int:
        """The number of this rank's node."""
        return next(number for number, ranks in enumerate(self.nodes) if self.rank in ranks)

    @property
    def place(self) -> int:
        """Where this rank stands among those of its node."""
        return self.nodes[self.node].index(self.rank)

    def named(self, found: Sequence[T]) -> Iterator[tuple[T, str]]:
        """What was found on each node, with the node's name."""
        return zip(found, self.names, strict=True)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on all of them. Collective."""
        return self.comm.allgather_object(value)

    def of_nodes(self, look: Callable[[], Any]) -> list[Any]:
        """What the first rank of each node sees, on all ranks. Collective; look() must not communicate."""
        seen = self.gather(look() if self.place == 0 else None)
        return [seen[ranks[0]] for ranks in self.nodes]


def find_ranks(world: World) -> Ranks:
    """Who is there and where. Collective."""
    if world.mpi is None:
        return Ranks(world, SerialComm(), None, ((0,),), (platform.node() or "localhost",))
    from zero_mpi.comm.mpi import MPIComm  # needs an MPI library
    from zero_mpi.comm.topology import find_topology, node_communicator

    everybody = world.mpi.COMM_WORLD
    node = node_communicator(everybody)
    nodes = find_topology(everybody, node).members
    names = everybody.allgather(platform.node() or world.mpi.Get_processor_name())
    return Ranks(world, MPIComm(), node, nodes, told_apart([names[ranks[0]] for ranks in nodes]))


def told_apart(names: list[str]) -> tuple[str, ...]:
    """Names without repeats: b, b (2), b (3)."""
    counts = [names[: place + 1].count(name) for place, name in enumerate(names)]
    return tuple(
        f"{name} ({count})" if count > 1 else name for name, count in zip(names, counts, strict=True)
    )
