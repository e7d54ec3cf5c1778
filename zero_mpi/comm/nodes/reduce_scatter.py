"""Reductions over several nodes: the gradients of a node's ranks go to the ranks that carry the sums.

Where the ranks of a node share memory they write their gradients into slots and say so, and a carrier reads
them there; a slot is free again once all carriers of the node have read it. Otherwise they send them.
Between the nodes the sums travel as `chain_sum` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zero_mpi.comm.base import AllOf, Handle
from zero_mpi.comm.message_type import mpi_type
from zero_mpi.comm.nodes.chain_sum import ChainSum, Source, Sum
from zero_mpi.comm.partition import Partition
from zero_mpi.comm.scratch import CHAIN_DEPTH
from zero_mpi.comm.shared.counters import Counters
from zero_mpi.comm.shared.gradient_pool import SharedGradientPool
from zero_mpi.comm.shared.node_memory import NodeMemory
from zero_mpi.comm.shared.words import ENTRIES, POSTED, SUMMED
from zero_mpi.comm.topology import Topology
from zero_mpi.comm.transfer import MessageComm, Running
from zero_mpi.device.arrays import empty
from zero_mpi.device.types import Array

TAGS = 1 << 14


class NodeReduceScatter:
    """The reductions of the ranks of `flat`, in their order.

    flat       transport of all ranks; its thread, or a rank that waits, pushes the transfers
    lane       the ranks of this one's position on all nodes, in the order of nodes
    node       the ranks of this node
    memory     the memory that they share, or None
    """

    def __init__(
        self, flat: MessageComm, topology: Topology, lane: Any, node: Any, memory: NodeMemory | None
    ) -> None:
        self.flat, self.topology, self.node, self.memory = flat, topology, node, memory
        self.chain = ChainSum(lane, topology)
        self.started = 0
        self._settled = 0  # reductions in which this rank has done its parts

    def start(
        self,
        full: Array,
        out: Array,
        partition: Partition,
        contributors: int,
        accumulate: bool,
        replicated: bool,
        label: str,
    ) -> Handle:
        """Begin a reduction; see `Comm.reduce_scatter`, and `chain_sum.Sum` for `replicated`. Collective."""
        total = Sum(self.started, full, out, partition, contributors, accumulate, replicated)
        self.started += 1
        self._count(total)
        source = self._post(total)
        running = [self._collect(total, source), self._carry(total, source)]
        running += [self._settle(total)] if self.memory else [self._give(total)]
        record = self.flat.meter.transfer("reduce_scatter", label)
        parts = [self.flat.start(each, "reduce_scatter", label, record) for each in running]
        return AllOf(parts, "reduce_scatter", label)

    def is_free(self, number: int) -> bool:
        """Return whether the table's entry of reduction `number` may be used again."""
        return self.memory is None or self.memory.counters.all_reached(SUMMED, number - ENTRIES + 1)

    def _count(self, total: Sum) -> None:
        nbytes = self.chain.given(total) * total.out.itemsize
        if self.topology.rank < total.contributors:
            carried = sum(item.stop - item.start for item in self.chain.items(total, self.topology.local))
            nbytes += (total.partition.length - carried) * total.full.itemsize
        self.flat.meter.sent_bytes += nbytes

    def _post(self, total: Sum) -> Source:
        """Announce where this rank's gradient lies; return the source of the node's gradients."""
        node = self.topology.members[self.topology.node]
        givers = [local for local, rank in enumerate(node) if rank < total.contributors]
        if self.memory is None:
            return GradientsByMessages(self.node, self.topology.local, givers, total, self.chain.piece)
        pool, offset = self.memory.find(total.full)
        assert pool is not None, "a gradient lies in a slot where memory is shared"
        self.memory.counters.note(total.number, offset)
        self.memory.counters.raise_to(POSTED, total.number + 1)
        return GradientsInSharedMemory(self.memory.counters, pool, givers, total)

    def _carry(self, total: Sum, source: Source) -> Running:
        yield from self.chain.carry(total, source)
        total.carried = True

    def _collect(self, total: Sum, source: Source) -> Running:
        yield from self.chain.collect(total, source)
        total.collected = True

    def _settle(self, total: Sum) -> Running:
        """Announce that this rank reads no slots any more and has its sum, in the order of reductions.

        When all ranks of the node have done so, slots are free, and sums that the node shares are whole.
        """
        assert self.memory is not None
        counters = self.memory.counters
        yield lambda: self._settled == total.number and total.carried and total.collected
        counters.raise_to(SUMMED, total.number + 1)
        self._settled += 1  # last: another thread may run the next reduction from here on
        yield lambda: counters.all_reached(SUMMED, total.number + 1)

    def _give(self, total: Sum) -> Running:
        """Send this rank's gradient to the ranks of its node that carry it."""
        requests: list[Any] = []
        if self.topology.rank < total.contributors:
            for local in others(self.topology.ranks_per_node, self.topology.local):
                for item in self.chain.items(total, local):
                    given = [total.full[item.span], mpi_type(total.full)]
                    requests.append(self.node.Isend(given, local, total.number % TAGS))
        yield requests


class GradientsInSharedMemory:
    """Gradients in the memory that the ranks of a node share."""

    def __init__(self, counters: Counters, pool: SharedGradientPool, givers: list[int], total: Sum) -> None:
        self.counters, self.pool, self.givers, self.total = counters, pool, givers, total

    def ready(self) -> bool:
        return self.counters.all_reached(POSTED, self.total.number + 1)

    def post(self, span: slice, room: int) -> list[Any]:
        return []

    def parts(self, span: slice, room: int) -> list[Array]:
        number, full = self.total.number, self.total.full
        return [
            self.pool.of_rank(rank, self.counters.noted(rank, number), full, span) for rank in self.givers
        ]


class GradientsByMessages:
    """Gradients that the ranks of a node send to each other, in pieces of so many elements."""

    def __init__(self, node: Any, local: int, givers: list[int], total: Sum, piece: int) -> None:
        self.node, self.local, self.givers, self.total, self.piece = node, local, givers, total, piece
        self.rooms: dict[tuple[int, int], Array] = {}

    def ready(self) -> bool:
        return True

    def room(self, number: int, rank: int, span: slice) -> Array:
        """Return the buffer in which a rank's part of a piece arrives."""
        assert number < CHAIN_DEPTH
        if (number, rank) not in self.rooms:
            self.rooms[number, rank] = empty(self.piece, self.total.full.dtype)
        return self.rooms[number, rank][: span.stop - span.start]

    def post(self, span: slice, room: int) -> list[Any]:
        kind = mpi_type(self.total.full)
        return [
            self.node.Irecv([self.room(room, rank, span), kind], rank, self.total.number % TAGS)
            for rank in self.givers
            if rank != self.local
        ]

    def parts(self, span: slice, room: int) -> list[Array]:
        own = self.total.full[span]
        return [own if rank == self.local else self.room(room, rank, span) for rank in self.givers]


def others(size: int, rank: int) -> Iterator[int]:
    """Return the other ranks, the nearest neighbour first, so that not all begin with the same one."""
    return ((rank + step) % size for step in range(1, size))
