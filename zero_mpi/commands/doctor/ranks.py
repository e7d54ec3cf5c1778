"""Ranks and nodes of the job to check, and rows of the table: name, value, verdict, remedy.

A node is a group of ranks that share memory, as the transports group them (`comm.topology`).
"""

import platform
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from textwrap import TextWrapper
from typing import Any, TypeVar

from zero_mpi.cli.text import WIDTH
from zero_mpi.comm import Comm, SerialComm
from zero_mpi.launch.world import World

T = TypeVar("T")
OK, NOTE, BAD = "ok", "note", "bad"  # note: slower, less safe or different bits; bad: a job would fail
TITLE = 23  # width of the column of names


@dataclass(frozen=True)
class Row:
    """Row of the table. A row has a remedy (a command, a setting, a request) unless its verdict is ok."""

    what: str
    value: str
    verdict: str = OK
    remedy: str = ""

    def __post_init__(self) -> None:
        assert (self.verdict == OK) == (not self.remedy), f"{self.what}: expected a remedy unless ok"


def judgement(name: str, value: str, fine: bool, remedy: str, fault: str = NOTE) -> Row:
    return Row(name, value) if fine else Row(name, value, fault, remedy)


def lines(row: Row) -> Iterator[str]:
    """Yield the lines of a row, wrapped to the table's width. The remedy is below the value."""
    wrap = TextWrapper(WIDTH, break_long_words=False, break_on_hyphens=False, replace_whitespace=False)
    wrap.subsequent_indent = margin = " " * (6 + TITLE + 1)
    yield from wrap.wrap(f"{row.verdict:6}{row.what:{TITLE}} {row.value}")
    if row.remedy:
        wrap.subsequent_indent += "   "
        yield from wrap.wrap(f"{margin}-> {row.remedy}")


@dataclass(frozen=True)
class Ranks:
    """Job to check: its ranks, nodes and flags. Every check gets it as an argument."""

    world: World
    comm: Comm
    node_comm: Any  # the raw communicator of this rank's node; None without MPI
    nodes: tuple[tuple[int, ...], ...]  # ranks of each node; the first node is that of rank 0
    names: tuple[str, ...]  # a host name for each node, for messages
    options: Namespace = field(default_factory=Namespace)
    figures: dict[str, Any] = field(default_factory=dict)  # measured values for the JSON file

    @property
    def node(self) -> int:
        return next(number for number, ranks in enumerate(self.nodes) if self.world.rank in ranks)

    @property
    def place(self) -> int:
        return self.nodes[self.node].index(self.world.rank)

    def named(self, values: Sequence[T]) -> Iterator[tuple[T, str]]:
        return zip(values, self.names, strict=True)

    def gather(self, value: Any) -> list[Any]:
        return self.comm.allgather_object(value)

    def of_nodes(self, inspect: Callable[[], Any]) -> list[Any]:
        """Return the results of inspect() on each node's first rank. It must not communicate. Collective."""
        results = self.gather(inspect() if self.place == 0 else None)
        return [results[ranks[0]] for ranks in self.nodes]


def find_ranks(world: World, options: Namespace) -> Ranks:
    """Return the ranks and their nodes. Hosts with equal names get numbers: b, b (2). Collective."""
    if world.mpi is None:
        return Ranks(world, SerialComm(), None, ((0,),), (platform.node() or "localhost",), options)
    from zero_mpi.comm.mpi import MPIComm  # needs an MPI library
    from zero_mpi.comm.topology import find_topology, node_communicator

    comm = world.mpi.COMM_WORLD
    node = node_communicator(comm)
    nodes = find_topology(comm, node).members
    of_ranks = comm.allgather(platform.node() or world.mpi.Get_processor_name())
    names = list[str]()
    for name in (of_ranks[ranks[0]] for ranks in nodes):
        count = sum(host.partition(" ")[0] == name for host in names) + 1
        names.append(f"{name} ({count})" if count > 1 else name)
    return Ranks(world, MPIComm(), node, nodes, tuple(names), options)
