"""Sums over the ranks of several nodes, in rank order. A sum passes from node to node.

Ranks with the same position on their nodes form a lane, and each lane sums a part of a unit. On node 0, the
lane's rank adds the gradients of its node's ranks and sends the sum to node 1, which adds the gradients of
its ranks and sends the sum on: ((out + rank 0) + rank 1) + ..., chunk by chunk, so that all nodes are busy.
Each element crosses a link once, however many ranks a node has. (Adding within nodes first would be parallel,
but its rounding differs.) The last node sends a sum to its owner; if every node has an owner, the sum is sent
back along the lane.

If the ranks of a node share memory, they write gradients into slots and announce them; each rank reads what
its lane sums. A slot is free when all ranks of the node have read it. Without slots, ranks send gradients.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zero_mpi.comm.base import AllOf, Handle, ReduceScatter
from zero_mpi.comm.kinds import CHAIN_DEPTH, ENTRIES, POSTED, SUMMED, chain_chunk
from zero_mpi.comm.mpi import MPIComm
from zero_mpi.comm.partition import Partition, others
from zero_mpi.comm.shared.memory import NodeMemory, SharedGradientPool
from zero_mpi.comm.start_mpi import mpi_type
from zero_mpi.comm.topology import Topology
from zero_mpi.comm.transfer import Running, loan
from zero_mpi.comm.wrapper import ProgressingWrapper
from zero_mpi.device.arrays import empty
from zero_mpi.device.ordered_sum import ordered_sum
from zero_mpi.device.types import Array

TAGS = 1 << 12
FORWARD, START, TOTAL = 0, 1, 2  # kinds of messages in a lane


@dataclass(frozen=True)
class Item:
    """Elements [start, stop) of a unit; their sum goes to node `home`, or to all nodes."""

    start: int
    stop: int
    home: int | None

    @property
    def span(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(eq=False)
class Sum:
    """A reduction in progress. `replicated`: whether every node has an owner of each element.

    The partition is over the ranks of a node if `replicated`, and over all ranks otherwise.
    """

    number: int
    call: ReduceScatter
    replicated: bool
    items: list[Item]  # items that this rank's lane sums, in order
    last: int  # last node with a rank that contributes
    chunks: int = 0  # number of chunks that this rank has added
    lends: bool = False  # whether this rank has started to send the old sums in `out`, if node 0 needs them
    loans: dict[int, Any] = field(default_factory=dict)  # item -> request that sends `out` to node 0
    finished: list[str] = field(default_factory=list)  # finished parts of this rank's work

    def tag(self, kind: int) -> int:
        return kind + 4 * (self.number % TAGS)


class NodeSums:
    """All reductions of the ranks of `flat`, in order.

    flat       transport of all ranks; its thread, or a waiting rank, advances transfers
    lane       ranks of all nodes with this rank's position on their node, in node order
    node       the ranks of this node
    memory     memory that the ranks of this node share, or None
    """

    def __init__(
        self, flat: MPIComm, topology: Topology, lane: Any, node: Any, memory: NodeMemory | None
    ) -> None:
        self.flat, self.topology, self.lane, self.node, self.memory = flat, topology, lane, node, memory
        self.chunk = chain_chunk(topology.nodes)
        self._started = 0
        self._settled = 0  # number of reductions in which this rank's work is done
        self._buffers: dict[Any, list[list[Array]]] = defaultdict(list)  # dtype -> free buffers for sums

    def start(self, comm: ProgressingWrapper, call: ReduceScatter, *, replicated: bool) -> Handle:
        """Start a reduction of `comm`, whose waits advance it; see `Sum`. Collective."""
        number, self._started = self._started, self._started + 1
        if self.memory is not None and number >= ENTRIES:  # reuses an entry of the table
            counters, earlier = self.memory.counters, number - ENTRIES
            comm.wait_until(lambda: counters.all_reached(SUMMED, earlier + 1), "reduce_scatter", call.label)
        items = self._items(call.partition, replicated, self.topology.local)
        last = (call.contributors - 1) // self.topology.ranks_per_node
        total = Sum(number, call, replicated, items, last)
        self.flat.meter.sent_bytes += self._bytes_sent(total)
        source = self._source(total)
        runs = [self._collect(total, source), self._carry(total, source)]
        runs += [self._settle(total, self.memory)] if self.memory else [self._give(total)]
        names = "reduce_scatter", call.label
        record = self.flat.meter.transfer(*names)
        return comm.wrapped(AllOf([self.flat.start(run, *names, record) for run in runs], *names))

    def _items(self, partition: Partition, replicated: bool, local: int) -> list[Item]:
        """Return the items that the lane of position `local` sums, in order."""
        parts: list[tuple[int | None, slice]] = [(None, partition.part(local))]
        if not replicated:
            owners = [ranks[local] for ranks in self.topology.members]
            parts = [(home, partition.part(rank)) for home, rank in enumerate(owners)]
        return [
            Item(start, min(start + self.chunk, part.stop), home)
            for home, part in parts
            for start in range(part.start, part.stop, self.chunk)
        ]

    def _bytes_sent(self, total: Sum) -> int:
        """Return the bytes that this rank sends to other nodes and passes to other ranks of its node."""
        node, last = self.topology.node, total.last
        length = sum(item.length for item in total.items)
        share = sum(item.length for item in total.items if item.home in (None, node))
        if total.replicated:
            outer = length * ((node < last) + len(self._neighbours(node)) - (node != last))
        else:
            outer = length * (node <= last) - share * (node == last)
            outer += share if total.call.accumulate and node else 0
        inner = total.call.partition.length - length if self.topology.rank < total.call.contributors else 0
        return outer * int(total.call.out.itemsize) + inner * int(total.call.full.itemsize)

    def _source(self, total: Sum) -> Source:
        """Announce where this rank's gradient is; return an object that reads the node's gradients."""
        node = self.topology.members[self.topology.node]
        givers = [local for local, rank in enumerate(node) if rank < total.call.contributors]
        if self.memory is None:
            return GradientsByMessages(self.node, self.topology.local, givers, total, self.chunk)
        pool, offset = self.memory.find(total.call.full)
        assert pool is not None, "a gradient must be in a slot if memory is shared"
        self.memory.counters.note(total.number, offset)
        self.memory.counters.raise_to(POSTED, total.number + 1)
        return GradientsInSharedMemory(self.memory, pool, givers, total)

    def _settle(self, total: Sum, memory: NodeMemory) -> Running:
        """Announce, in the order of reductions, that this rank has read all slots and has its sum.

        When all ranks of the node have announced it, slots are free and shared sums are complete.
        """
        yield lambda: self._settled == total.number and len(total.finished) == 2
        memory.counters.raise_to(SUMMED, total.number + 1)
        self._settled += 1  # last, because from now on another thread may run the next reduction
        yield lambda: memory.counters.all_reached(SUMMED, total.number + 1)

    def _give(self, total: Sum) -> Running:
        """Send parts of this rank's gradient to the ranks of its node whose lanes sum these parts."""
        requests: list[Any] = []
        if self.topology.rank < total.call.contributors:
            for local in others(self.topology.local, self.topology.ranks_per_node):
                for item in self._items(total.call.partition, total.replicated, local):
                    message = [total.call.full[item.span], mpi_type(total.call.full)]
                    requests.append(self.node.Isend(message, local, total.number % TAGS))
        yield requests

    def _send(self, array: Array, node: int, kind: int, total: Sum) -> Any:
        return self.lane.Isend([array, mpi_type(array)], node, total.tag(kind))

    def _receive(self, array: Array, node: int, kind: int, total: Sum) -> Any:
        return self.lane.Irecv([array, mpi_type(array)], node, total.tag(kind))

    def _neighbours(self, node: int) -> list[int]:
        return [peer for peer in (node - 1, node + 1) if 0 <= peer < self.topology.nodes]

    def _out(self, total: Sum, item: Item) -> Array:
        number = self.topology.local if total.replicated else self.topology.rank
        first = total.call.partition.bounds[number]
        return total.call.out[item.start - first : item.stop - first]

    # ------------------------------------------------------------------------------------------ forward

    def _carry(self, total: Sum, source: Source) -> Running:
        """Add this node's gradients, if there are any, chunk by chunk, and send the sums on."""
        if self.topology.node <= total.last:
            yield source.ready
            yield lambda: total.lends
            dtype = total.call.out.dtype
            with loan(
                self._buffers[dtype], lambda: [empty(self.chunk, dtype) for _ in range(CHAIN_DEPTH)]
            ) as slots:
                yield from self._add_and_pass_on(total, source, slots)
        total.finished.append("carried")

    def _add_and_pass_on(self, total: Sum, source: Source, slots: list[Array]) -> Running:
        items = total.items
        posted: list[list[Any]] = []
        sends: list[list[Any]] = [[] for _ in slots]
        for number in range(len(items) + CHAIN_DEPTH - 1):
            slot = number % CHAIN_DEPTH
            if number < len(items):
                yield sends[slot]  # wait until the buffer is free
                posted.append(self._post(total, source, items[number], slots[slot], slot))
            oldest = number - (CHAIN_DEPTH - 1)
            if 0 <= oldest < len(items):
                yield posted[oldest]
                slot = oldest % CHAIN_DEPTH
                self._add(total, source, items[oldest], slots[slot], slot)
                if self.topology.node == total.last:
                    yield [total.loans[oldest]] if oldest in total.loans else []
                sends[slot] = self._pass_on(total, items[oldest], slots[slot])
                total.chunks += 1
        yield [request for requests in sends for request in requests]

    def _post(self, total: Sum, source: Source, item: Item, slot: Array, number: int) -> list[Any]:
        requests = source.post(item.span, number)
        sender = self._comes_from(total, item)
        if sender is not None:
            kind = FORWARD if self.topology.node else START
            requests.append(self._receive(slot[: item.length], sender, kind, total))
        return requests

    def _comes_from(self, total: Sum, item: Item) -> int | None:
        """Return the node from which this node receives the sum so far, or None."""
        if self.topology.node:
            return self.topology.node - 1
        return item.home if total.call.accumulate and item.home else None

    def _add(self, total: Sum, source: Source, item: Item, slot: Array, number: int) -> None:
        target, parts = slot[: item.length], source.parts(item.span, number)
        is_head = self._comes_from(total, item) is None
        if is_head and total.call.accumulate:
            np.copyto(target, self._out(total, item))
        ordered_sum(target, parts, accumulate=total.call.accumulate or not is_head)

    def _pass_on(self, total: Sum, item: Item, slot: Array) -> list[Any]:
        """Send the sum to the next node, or from the last node to the owner."""
        node, summed = self.topology.node, slot[: item.length]
        if node < total.last:
            return [self._send(summed, node + 1, FORWARD, total)]
        if item.home is not None and item.home != node:
            return [self._send(summed, item.home, TOTAL, total)]
        np.copyto(self._out(total, item), summed)
        if item.home == node:
            return []
        return [self._send(self._out(total, item), peer, TOTAL, total) for peer in self._neighbours(node)]

    # --------------------------------------------------------------------------------------------- back

    def _collect(self, total: Sum, source: Source) -> Running:
        """Receive the sums that this rank owns, and send them on if other nodes need them too.

        First wait until all ranks of the node have announced the reduction; until then they may read `out`.
        """
        yield source.ready
        node, last, items = self.topology.node, total.last, total.items
        numbers = [number for number, item in enumerate(items) if item.home in (None, node)]
        if total.call.accumulate and not total.replicated and node:
            for number in numbers:
                total.loans[number] = self._send(self._out(total, items[number]), 0, START, total)
        total.lends = True
        if node != last:
            sender = last if not total.replicated else node + 1 if node < last else node - 1
            requests = []
            for number in numbers:
                yield self._may_be_written(total, number)
                requests.append(self._receive(self._out(total, items[number]), sender, TOTAL, total))
            targets = [peer for peer in self._neighbours(node) if total.replicated and peer != sender]
            sends: list[Any] = []
            for number, request in zip(numbers, requests, strict=True):
                yield [request]
                sends += [self._send(self._out(total, items[number]), peer, TOTAL, total) for peer in targets]
            yield sends
        total.finished.append("collected")

    def _may_be_written(self, total: Sum, number: int) -> Any:
        """Return a condition for receiving into `out`: its old content has been sent or added."""
        if number in total.loans:
            return [total.loans[number]]
        if total.call.accumulate and self.topology.node == 0:
            return lambda: total.chunks > number
        return []


class GradientsInSharedMemory:
    """Gradients of a node's ranks, read from the node's shared memory."""

    def __init__(self, memory: NodeMemory, pool: SharedGradientPool, givers: list[int], total: Sum) -> None:
        self.counters, self.pool, self.givers, self.total = memory.counters, pool, givers, total

    def ready(self) -> bool:
        return self.counters.all_reached(POSTED, self.total.number + 1)

    def post(self, span: slice, slot: int) -> list[Any]:
        """Start and return requests that must complete before a call of `parts` with the same arguments."""
        return []

    def parts(self, span: slice, slot: int) -> list[Array]:
        """Return elements `span` of the unit from each contributing rank of the node, in rank order."""
        entry, full = self.total.number, self.total.call.full
        return [self.pool.of_rank(rank, self.counters.noted(rank, entry), full, span) for rank in self.givers]


class GradientsByMessages:
    """Gradients of a node's ranks, received as messages of `chunk` elements."""

    def __init__(self, node: Any, local: int, givers: list[int], total: Sum, chunk: int) -> None:
        self.node, self.local, self.givers, self.total, self.chunk = node, local, givers, total, chunk
        self.buffers: dict[tuple[int, int], Array] = {}  # (slot, rank) -> buffer for a chunk

    def ready(self) -> bool:
        return True

    def _buffer(self, number: int, rank: int, span: slice) -> Array:
        if (number, rank) not in self.buffers:
            self.buffers[number, rank] = empty(self.chunk, self.total.call.full.dtype)
        return self.buffers[number, rank][: span.stop - span.start]

    def post(self, span: slice, slot: int) -> list[Any]:
        kind, tag = mpi_type(self.total.call.full), self.total.number % TAGS
        return [
            self.node.Irecv([self._buffer(slot, rank, span), kind], rank, tag)
            for rank in self.givers
            if rank != self.local
        ]

    def parts(self, span: slice, slot: int) -> list[Array]:
        part = self.total.call.full[span]
        return [part if rank == self.local else self._buffer(slot, rank, span) for rank in self.givers]


Source = GradientsInSharedMemory | GradientsByMessages
