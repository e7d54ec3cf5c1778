"""Sums over several nodes in rank order: they travel from node to node and grow on the way.

On each node one rank of a lane adds what its node's ranks give to the sum that came from the node before,
and passes it on: ((out + rank 0) + rank 1) + ..., piece by piece, so that all nodes are at work. A link
carries an element once, however many ranks per node has. (To add within the nodes first would need no order
between them, but it is another sum.) From the last node a sum goes to its owner; where every node has an
owner, it goes back along the lane.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from zero_mpi.comm.message_type import mpi_type
from zero_mpi.comm.partition import Partition
from zero_mpi.comm.scratch import CHAIN_DEPTH, chain_piece
from zero_mpi.comm.topology import Topology
from zero_mpi.comm.transfer import Running
from zero_mpi.device.arrays import empty
from zero_mpi.device.ordered_sum import ordered_sum
from zero_mpi.device.types import Array

TAGS = 1 << 12
FORWARD, START, TOTAL = 0, 1, 2  # the kinds of messages in a lane


class Source(Protocol):
    """Source of the gradients that the ranks of a node contribute."""

    def ready(self) -> bool:
        """Return whether the gradients may be asked for."""
        ...

    def post(self, span: slice, room: int) -> list[Any]:
        """Return requests that must be complete before `parts` of the same arguments."""
        ...

    def parts(self, span: slice, room: int) -> list[Array]:
        """Return the elements `span` of the unit of each contributing rank of the node, in rank order."""
        ...


@dataclass(frozen=True)
class Item:
    """Elements [start, stop) of a unit whose sum is for node `home`, or for all nodes."""

    start: int
    stop: int
    home: int | None

    @property
    def span(self) -> slice:
        """Place of the item in the unit."""
        return slice(self.start, self.stop)


@dataclass
class Sum:
    """One reduction: as in `Comm.reduce_scatter`; `replicated`: every node has an owner of each element.

    Partitions are over the ranks of a node where sums are replicated, else over all ranks.
    """

    number: int
    full: Array
    out: Array
    partition: Partition
    contributors: int
    accumulate: bool
    replicated: bool
    added: int = 0  # pieces that this rank has added so far
    carried: bool = False  # this rank has done that part
    collected: bool = False
    lends: bool = False  # whether the sums that this rank lends are on their way
    lent: dict[int, Any] = field(default_factory=dict)  # by piece: the request that sends `out` to node 0


def cut(part: slice, piece: int, home: int | None) -> Iterator[Item]:
    """Yield the pieces of a slice of a unit."""
    for start in range(part.start, part.stop, piece):
        yield Item(start, min(start + piece, part.stop), home)


class ChainSum:
    """This rank's part in the sums of its lane, a communicator whose ranks are the nodes."""

    def __init__(self, lane: Any, topology: Topology) -> None:
        self.lane, self.topology = lane, topology
        self.piece = chain_piece(topology.nodes)
        self._rooms: dict[Any, list[list[Array]]] = defaultdict(list)  # buffers by type, for the next sums

    def items(self, total: Sum, local: int) -> list[Item]:
        """Return the items that the lane of position `local` carries, in the order in which it does."""
        if total.replicated:
            return list(cut(total.partition.part(local), self.piece, None))
        homes = enumerate(ranks[local] for ranks in self.topology.members)
        return [item for home, rank in homes for item in cut(total.partition.part(rank), self.piece, home)]

    def last(self, total: Sum) -> int:
        """Return the last node with a rank that contributes."""
        return (total.contributors - 1) // self.topology.ranks_per_node

    def out(self, total: Sum, item: Item) -> Array:
        """Return the piece of this rank's slice."""
        mine = self.topology.local if total.replicated else self.topology.rank
        first = total.partition.bounds[mine]
        return total.out[item.start - first : item.stop - first]

    def _send(self, array: Array, node: int, kind: int, total: Sum) -> Any:
        return self.lane.Isend([array, mpi_type(array)], node, tag(kind, total))

    def _receive(self, array: Array, node: int, kind: int, total: Sum) -> Any:
        return self.lane.Irecv([array, mpi_type(array)], node, tag(kind, total))

    # ------------------------------------------------------------------------------------------ forward

    def carry(self, total: Sum, source: Source) -> Running:
        """Add this node's part piece by piece and pass the sums on; do nothing on nodes without a part."""
        if self.topology.node > self.last(total):
            return
        yield source.ready
        yield lambda: total.lends
        items = self.items(total, self.topology.local)
        rooms = self._take(total.out.dtype)
        posted: list[list[Any]] = []
        sent: list[list[Any]] = [[] for _ in rooms]
        for number in range(len(items) + CHAIN_DEPTH - 1):
            room = number % CHAIN_DEPTH
            if number < len(items):
                yield sent[room]  # then its memory is free
                posted.append(self._post(total, source, items[number], rooms[room], room))
            done = number - (CHAIN_DEPTH - 1)
            if 0 <= done < len(items):
                yield posted[done]
                room = done % CHAIN_DEPTH
                self._add(total, source, items[done], rooms[room], room)
                if self.topology.node == self.last(total):
                    yield [total.lent[done]] if done in total.lent else []
                sent[room] = self._pass_on(total, items[done], rooms[room])
                total.added += 1
        yield [request for requests in sent for request in requests]
        self._rooms[total.out.dtype].append(rooms)

    def _take(self, dtype: Any) -> list[Array]:
        try:
            return self._rooms[dtype].pop()
        except IndexError:
            return [empty(self.piece, dtype) for _ in range(CHAIN_DEPTH)]

    def _post(self, total: Sum, source: Source, item: Item, room: Array, number: int) -> list[Any]:
        requests = source.post(item.span, number)
        coming = self._comes_from(total, item)
        if coming is not None:
            kind = FORWARD if self.topology.node else START
            requests.append(self._receive(room[: item.stop - item.start], coming, kind, total))
        return requests

    def _comes_from(self, total: Sum, item: Item) -> int | None:
        """Return the node that sends what this one adds to; None: nothing is sent."""
        if self.topology.node:
            return self.topology.node - 1
        return item.home if total.accumulate and item.home else None

    def _add(self, total: Sum, source: Source, item: Item, room: Array, number: int) -> None:
        target, parts = room[: item.stop - item.start], source.parts(item.span, number)
        is_head = self._comes_from(total, item) is None
        if is_head and total.accumulate:
            np.copyto(target, self.out(total, item))
        ordered_sum(target, parts, accumulate=total.accumulate or not is_head)

    def _pass_on(self, total: Sum, item: Item, room: Array) -> list[Any]:
        """Send the sum to the next node, or from the last one to where it belongs."""
        node, summed = self.topology.node, room[: item.stop - item.start]
        if node < self.last(total):
            return [self._send(summed, node + 1, FORWARD, total)]
        if item.home not in (None, node):
            assert item.home is not None
            return [self._send(summed, item.home, TOTAL, total)]
        np.copyto(self.out(total, item), summed)
        if item.home == node:
            return []
        return [self._send(self.out(total, item), other, TOTAL, total) for other in self._beside(node)]

    def _beside(self, node: int) -> list[int]:
        return [other for other in (node - 1, node + 1) if 0 <= other < self.topology.nodes]

    # --------------------------------------------------------------------------------------------- back

    def collect(self, total: Sum, source: Source) -> Running:
        """Receive the sums that this rank owns, and hand them on where others own them too.

        It first waits until all of the node have announced the reduction: they may read `out` until then.
        """
        yield source.ready
        node, last = self.topology.node, self.last(total)
        items = self.items(total, self.topology.local)
        mine = [number for number, item in enumerate(items) if item.home in (None, node)]
        if total.accumulate and not total.replicated and node:
            for number in mine:
                total.lent[number] = self._send(self.out(total, items[number]), 0, START, total)
        total.lends = True
        if node == last:
            return
        coming = last if not total.replicated else node + 1 if node < last else node - 1
        requests = []
        for number in mine:
            yield self._may_be_written(total, number)
            requests.append(self._receive(self.out(total, items[number]), coming, TOTAL, total))
        onward = [other for other in self._beside(node) if total.replicated and other != coming]
        sent: list[Any] = []
        for number, request in zip(mine, requests, strict=True):
            yield [request]
            sent += [self._send(self.out(total, items[number]), other, TOTAL, total) for other in onward]
        yield sent

    def _may_be_written(self, total: Sum, number: int) -> Any:
        """Return the condition for receiving a sum into `out`: its old content must have been taken."""
        if number in total.lent:
            return [total.lent[number]]
        if total.accumulate and self.topology.node == 0:
            return lambda: total.added > number
        return []

    def given(self, total: Sum) -> int:
        """Return the number of elements that this rank sends to other nodes."""
        node, last = self.topology.node, self.last(total)
        items = self.items(total, self.topology.local)
        whole = sum(item.stop - item.start for item in items)
        mine = sum(item.stop - item.start for item in items if item.home in (None, node))
        if total.replicated:
            back = len(self._beside(node)) - (node != last)
            return whole * ((node < last) + back)
        lent = mine if total.accumulate and node else 0
        return lent + (whole if node < last else whole - mine if node == last else 0)


def tag(kind: int, total: Sum) -> int:
    """Return the tag of a message of a sum."""
    return kind + 4 * (total.number % TAGS)
