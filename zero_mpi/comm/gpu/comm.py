"""Collectives on device memory: what travels, to whom, and in which order it is added; a backend moves it.

The exact reduction is that of the host (`comm.mpi`): each owner is sent its slice by every rank and adds the
slices in rank order, in float32, piece by piece; so the bits are the same whatever carries them. Only
movement is asked of a backend, because no library reduces device memory everywhere, or bfloat16. Arrays of
the host (vectors, objects, checkpoints, the corpus) go the way they always do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from zero_mpi.comm.base import Comm, Handle
from zero_mpi.comm.gpu.exchanges import MPI, Backend, Exchange, Tickets, borrowed, passed
from zero_mpi.comm.gpu.handles import DeviceAdoptingWrapper, Result, StreamHandle
from zero_mpi.comm.gpu.streams import GpuStreams
from zero_mpi.comm.mpi import TAGS, MPIComm
from zero_mpi.comm.partition import Partition, Piece
from zero_mpi.comm.progressing import ProgressingWrapper
from zero_mpi.comm.scratch import TRANSFERS
from zero_mpi.comm.topology import find_topology, node_communicator
from zero_mpi.comm.transfer import Running
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError

TaggedTransfer = Callable[[Iterator[int]], Running]  # makes a transfer from tags, one for each exchange
ALIGNED = 1024  # elements: where slices begin, so that the kernel reads four at a time


def on_host(array: Any) -> bool:
    """Return whether an array lies in the memory of the host."""
    return isinstance(array, np.ndarray)


class DeviceComm(ProgressingWrapper):
    """The ranks of `inner`, a transport for the host, which takes device memory by `backend`.

    about: what it uses, for messages
    """

    def __init__(self, inner: MPIComm, backend: Backend, streams: GpuStreams, about: str = "") -> None:
        node = node_communicator(MPI.COMM_WORLD)
        super().__init__(inner, node.Get_size())
        node.Free()
        self.kind, self.exact = backend.kind, inner.exact or not backend.kind.adds
        self.backend, self.streams, self._about = backend, streams, about
        self._tickets, self._alone = Tickets(TRANSFERS), Tickets(1)
        self._tag = 0
        self._rooms: dict[Any, list[list[Array]]] = defaultdict(list)  # buffers by type, for reductions
        self._arrivals: dict[int, list[Array]] = defaultdict(list)  # buffers by size, for sums of the library

    @property
    def about(self) -> str:
        return self._about or self.kind.name

    # ------------------------------------------------------------------------------------ transfers

    def _start(self, running: TaggedTransfer, number: int, result: Result, kind: str, label: str) -> Handle:
        """Begin a transfer of `number` exchanges, the same number on all ranks."""
        first, self._tag = self._tag, self._tag + number
        tags = (number % TAGS for number in count(first))
        return self._begin(self._tickets, running(tags), result, kind, label)

    def _begin(self, tickets: Tickets, running: Running, result: Result, kind: str, label: str) -> Handle:
        transfer = self._ordered(tickets, running, result)
        inner = self._library.start(transfer, kind, label)
        return StreamHandle(self, self.streams, inner, result, kind, label)

    def _ordered(self, tickets: Tickets, running: Running, result: Result) -> Running:
        """Yield from `running` after all that was computed so far, and set the mark at its end."""
        begin, turn = self.streams.begin(), tickets.take()
        try:
            if self.backend.in_order:
                self.streams.follow(begin)  # the GPU waits, and the host does not
            else:
                yield lambda: begin.done and tickets.has_come(turn)
            yield from running
            result.mark = self.streams.mark()
        finally:
            tickets.end(turn)
        if self.backend.in_order:  # wait for the other ranks here: a wait has a name and is watched
            yield passed(result.mark)

    # -------------------------------------------------------------------------------------- gathers

    def allgather(self, shard: Array | None, full: Array, partition: Partition, label: str = "") -> Handle:
        if on_host(full):
            return super().allgather(shard, full, partition, label)
        self.meter.sent_bytes += partition.counts[self.rank] * full.itemsize * (self.size - 1)
        starts = self._starts(partition, full, summed=False)

        def running(tags: Iterator[int]) -> Running:
            if shard is not None:
                self.streams.copy(full[partition.part(self.rank)], shard)
            yield from self.backend.run(self._gathers(shard, full, partition, starts), tags)

        return self._start(running, len(starts), Result(shard, full), "allgather", label)

    def _starts(self, partition: Partition, array: Array, *, summed: bool) -> range:
        """Return the places in every slice at which the pieces of an exchange begin."""
        return range(0, max(partition.counts), self.backend.largest(array.itemsize, summed=summed))

    def _gathers(
        self, shard: Array | None, full: Array, partition: Partition, starts: range
    ) -> Iterator[Exchange]:
        """Yield exchanges in which every rank sends a piece of its slice to all others."""
        own = full[partition.part(self.rank)] if shard is None else shard
        for start in starts:
            mine = own[start : min(start + starts.step, own.size)] if start < own.size else own[:0]
            pieces = [
                (full[self._span(partition, rank, start, starts.step)], rank) for rank in self._sources()
            ]
            yield Exchange(
                sends=[(mine, self._targets())] if mine.size else [],
                receives=[(piece, rank) for piece, rank in pieces if piece.size],
            )

    def _targets(self) -> list[int]:
        """Return the other ranks, the next one first: so that they do not all hit one."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def _sources(self) -> list[int]:
        """Return the other ranks in the order in which this one is their target."""
        return [(self.rank - step) % self.size for step in range(1, self.size)]

    @staticmethod
    def _span(partition: Partition, rank: int, start: int, length: int) -> slice:
        """Return the part of `rank`'s slice in the piece that begins at `start` of every slice."""
        first, last = partition.bounds[rank], partition.bounds[rank + 1]
        return slice(min(first + start, last), min(first + start + length, last))

    # ----------------------------------------------------------------------------------- reductions

    def reduce_scatter(
        self,
        full: Array,
        out: Array,
        partition: Partition,
        *,
        contributors: int | None = None,
        accumulate: bool = False,
        label: str = "",
    ) -> Handle:
        if on_host(full):
            return super().reduce_scatter(
                full, out, partition, contributors=contributors, accumulate=accumulate, label=label
            )
        contributors = self.size if contributors is None else contributors
        if self.rank < contributors or not self.exact:
            self.meter.sent_bytes += partition.outside(self.rank) * full.itemsize
        if not self.exact:
            return self._reduce_in_library(full, out, partition, accumulate, label)
        starts = self._starts(partition, full, summed=True)

        def running(tags: Iterator[int]) -> Running:
            with self._borrowed_rooms(full, starts) as rooms:
                exchanges = self._sums(full, out, partition, contributors, accumulate, starts, rooms)
                yield from self.backend.run(exchanges, tags)

        return self._start(running, len(starts), Result(full, out), "reduce_scatter", label)

    def _borrowed_rooms(self, full: Array, starts: range) -> AbstractContextManager[list[Array]]:
        return borrowed(self._rooms[full.dtype], partial(self._new_rooms, full.dtype, starts.step))

    def _new_rooms(self, dtype: Any, step: int) -> list[Array]:
        """Return buffers for each exchange in flight, with room for a piece from every other rank."""
        return [self.streams.empty((self.size - 1) * step, dtype) for _ in range(self.backend.depth)]

    def _sums(
        self,
        full: Array,
        out: Array,
        partition: Partition,
        contributors: int,
        accumulate: bool,
        starts: range,
        rooms: list[Array],
    ) -> Iterator[Exchange]:
        """Yield exchanges in which every rank sends a piece of each slice to its owner, which adds them."""
        step = starts.step
        for number, start in enumerate(starts):
            room, mine = rooms[number % len(rooms)], self._span(partition, self.rank, start, step)
            length = mine.stop - mine.start
            given = {
                rank: room[(rank - (rank > self.rank)) * step :][:length]
                for rank in self._sources()
                if length and rank < contributors
            }
            theirs = [(full[self._span(partition, rank, start, step)], [rank]) for rank in self._targets()]
            parts = given | ({self.rank: full[mine]} if self.rank < contributors else {})
            ordered = [parts[rank] for rank in sorted(parts)]
            add = partial(self.streams.add, out[start : start + length], ordered, accumulate)
            yield Exchange(
                sends=[piece for piece in theirs if piece[0].size] if self.rank < contributors else [],
                receives=[(piece, rank) for rank, piece in given.items()],
                then=add if length else None,
            )

    def _reduce_in_library(
        self, full: Array, out: Array, partition: Partition, accumulate: bool, label: str
    ) -> Handle:
        """Reduce by the library, whose call blocks: one at a time, in the same order on all ranks."""

        def running() -> Running:
            if not accumulate:
                self.backend.sum_slices(full, out, partition)
                return
            new = partial(self.streams.empty, out.size, out.dtype)
            with borrowed(self._arrivals[out.size], new) as arrived:
                self.backend.sum_slices(full, arrived, partition)
                self.streams.add(out, [arrived], True)
                yield from self._added()

        return self._begin(self._alone, running(), Result(full, out), "reduce_scatter", label)

    def allreduce(self, array: Array, label: str = "") -> Handle:
        if on_host(array):
            return super().allreduce(array, label)
        self.meter.sent_bytes += array.nbytes if self.size > 1 else 0
        if not self.exact:

            def in_library() -> Running:
                self.backend.sum_all(array)
                yield []

            return self._begin(self._alone, in_library(), Result(array), "allreduce", label)
        partition = Partition(array.size, self.size, ALIGNED)
        sums = self._starts(partition, array, summed=True)
        gathers = self._starts(partition, array, summed=False)
        own = array[partition.part(self.rank)]

        def running(tags: Iterator[int]) -> Running:
            with self._borrowed_rooms(array, sums) as rooms:
                added = self._sums(array, own, partition, self.size, False, sums, rooms)
                yield from self.backend.run(added, tags)
            yield from self._added()
            yield from self.backend.run(self._gathers(None, array, partition, gathers), tags)

        return self._start(running, len(sums) + len(gathers), Result(array), "allreduce", label)

    def _added(self) -> Running:
        """Wait for launched sums if what comes next does not follow the order of their stream."""
        if not self.backend.in_order:
            yield passed(self.streams.mark())

    def broadcast(self, array: Array, root: int = 0, label: str = "") -> Handle:
        if on_host(array):
            return super().broadcast(array, root, label)
        flat = array.reshape(-1)
        starts = range(0, flat.size, self.backend.largest(array.itemsize, summed=False))

        def exchanges() -> Iterator[Exchange]:
            for start in starts:
                piece = flat[start : start + starts.step]
                yield Exchange(
                    sends=[(piece, self._targets())] if self.rank == root else [],
                    receives=[] if self.rank == root else [(piece, root)],
                )

        def running(tags: Iterator[int]) -> Running:
            return self.backend.run(exchanges(), tags)

        return self._start(running, len(starts), Result(array), "broadcast", label)

    # ---------------------------------------------------------------------------------- everything else

    def gather(
        self, part: Array | None, room: Array | None, piece: Piece, root: int = 0, label: str = ""
    ) -> None:
        assert all(array is None or on_host(array) for array in (part, room)), "checkpoints are the host's"
        super().gather(part, room, piece, root, label)

    def background(self) -> Comm:
        return DeviceAdoptingWrapper(self._inner.background(), self.streams)

    def shard_group(self) -> Comm:
        node = node_communicator(MPI.COMM_WORLD)
        nodes = find_topology(MPI.COMM_WORLD, node).nodes
        node.Free()
        if nodes > 1:
            raise UsageError(
                f"--strategy hybrid-shard: with --device cuda it works on one node only, found {nodes}; use "
                "full-shard"
            )
        return self

    def close(self) -> None:
        self.backend.close()
        super().close()
