"""Collectives on device memory. This module decides which chunks go to which rank; backends send them.

The exact reduction is the same as on the host (`comm.mpi`): every rank sends each owner its slice, and the
owner adds the slices in rank order, in float32, chunk by chunk. Backends do not add in exact mode, because
not every library can reduce device memory, or bfloat16. Host data (vectors, objects, checkpoints, the corpus)
uses the host's transport.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from zero_mpi.comm.base import Comm, Handle, ReduceScatter
from zero_mpi.comm.gpu.backends import Backend
from zero_mpi.comm.gpu.exchanges import MPI, Exchange, GpuStreams, Tickets, completion
from zero_mpi.comm.kinds import TRANSFERS
from zero_mpi.comm.mpi import TAGS, MPIComm
from zero_mpi.comm.partition import Partition, others
from zero_mpi.comm.topology import node_communicator
from zero_mpi.comm.transfer import Running, loan
from zero_mpi.comm.wrapper import CommWrapper, ProgressingHandle, ProgressingWrapper
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError
from zero_mpi.telemetry import spans

TaggedTransfer = Callable[[Iterator[int]], Running]  # returns a transfer, given one tag per exchange
ALIGNED = 1024  # slices begin at multiples of this many elements, so that the kernel can read four at once


def on_host(array: Any) -> bool:
    return isinstance(array, np.ndarray)


class Result:
    """Result of a transfer: an event after its last copy or sum, and the arrays that copies and sums read.

    The result keeps these arrays alive, because the device may read them after the host has returned.
    """

    mark: Any = None

    def __init__(self, *arrays: Array | None) -> None:
        self.arrays = arrays


class StreamHandle(ProgressingHandle):
    """A transfer of device memory. Work launched after `wait` runs on the device after the transfer."""

    def __init__(self, comm: DeviceComm, inner: Handle, result: Result, kind: str, label: str) -> None:
        super().__init__(comm, inner)
        self.kind, self.label = kind, label  # `inner` may be DONE, which has no label
        self._streams, self._result = comm.streams, result

    def test(self) -> bool:
        if not super().test():
            return False
        mark = self._result.mark  # None after an error, which `wait` raises
        return mark is None or bool(mark.done)

    def wait(self) -> None:
        super().wait()
        with spans.during(spans.STALLS, self.kind, self.label):
            self._streams.join(self._result.mark)  # the device may wait, the host does not
        self._result.arrays = ()


class DeviceAdoptingWrapper(CommWrapper):
    """Wrapper that makes the GPU current before each call, since a call may advance device messages."""

    def __init__(self, inner: Comm, streams: GpuStreams) -> None:
        self._comm, self._streams = inner, streams
        super().__init__(inner)

    @property
    def _inner(self) -> Comm:  # each forwarded call reads this property
        self._streams.adopt()
        return self._comm

    @_inner.setter
    def _inner(self, inner: Comm) -> None:
        self._comm = inner


class DeviceComm(ProgressingWrapper):
    """Transport of the ranks of a host transport `inner`. Device memory is sent through `backend`."""

    def __init__(self, inner: MPIComm, backend: Backend, streams: GpuStreams, description: str) -> None:
        node = node_communicator(MPI.COMM_WORLD)
        super().__init__(inner, node.Get_size())
        node.Free()
        self.kind, self.exact = backend.kind, inner.exact or not backend.kind.adds
        self.backend, self.streams, self._about = backend, streams, description
        self._tickets, self._alone = Tickets(TRANSFERS), Tickets(1)
        self._tag, self._others = 0, others(self.rank, self.size)
        self._buffers: dict[Any, list[list[Array]]] = defaultdict(list)  # reduction buffers by type
        self._arrivals: dict[int, list[Array]] = defaultdict(list)  # size -> buffers for the library's sums

    @property
    def about(self) -> str:
        return self._about

    def _start(self, running: TaggedTransfer, number: int, result: Result, kind: str, label: str) -> Handle:
        """Start a transfer of `number` exchanges; all ranks pass the same number."""
        first, self._tag = self._tag, self._tag + number
        tags = (number % TAGS for number in count(first))
        return self._begin(self._tickets, running(tags), result, kind, label)

    def _begin(self, tickets: Tickets, running: Running, result: Result, kind: str, label: str) -> Handle:
        inner = self._library.start(self._ordered(tickets, running, result), kind, label)
        return StreamHandle(self, inner, result, kind, label)

    def _ordered(self, tickets: Tickets, running: Running, result: Result) -> Running:
        """Run `running` after all computation launched so far; at the end, record the event of the result."""
        begin, turn = self.streams.begin(), tickets.take()
        try:
            if self.backend.in_order:
                self.streams.follow(begin)  # the GPU waits, the host does not
            else:
                yield lambda: begin.done and tickets.has_come(turn)
            yield from running
            result.mark = self.streams.mark()
        finally:
            tickets.end(turn)
        if self.backend.in_order:  # wait for the other ranks here, so that the wait is named and supervised
            yield completion(result.mark)

    def _starts(self, partition: Partition, array: Array, *, summed: bool) -> range:
        return range(0, max(partition.counts), self.backend.largest(array.itemsize, summed=summed))

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

    def _gathers(
        self, shard: Array | None, full: Array, partition: Partition, starts: range
    ) -> Iterator[Exchange]:
        """Yield exchanges in which every rank sends a chunk of its slice to all others."""
        local, neighbours = full[partition.part(self.rank)] if shard is None else shard, self._others
        for start in starts:
            part = local[start : min(start + starts.step, local.size)] if start < local.size else local[:0]
            chunks = [(full[partition.span(rank, start, starts.step)], rank) for rank in reversed(neighbours)]
            yield Exchange(
                sends=[(part, neighbours)] if part.size else [],
                receives=[(chunk, rank) for chunk, rank in chunks if chunk.size],
            )

    def _reduce(self, call: ReduceScatter) -> Handle:
        full, names = call.full, ("reduce_scatter", call.label)
        if on_host(full):
            return super()._reduce(call)
        if self.rank < call.contributors or not self.exact:
            self.meter.sent_bytes += call.partition.outside(self.rank) * full.itemsize
        result = Result(full, call.out)
        if not self.exact:
            return self._begin(self._alone, self._in_library(call), result, *names)
        starts = self._starts(call.partition, full, summed=True)
        return self._start(partial(self._exact_sums, call, starts), len(starts), result, *names)

    def _exact_sums(self, call: ReduceScatter, starts: range, tags: Iterator[int]) -> Running:
        """Run exchanges that send a chunk of each slice to its owner, which adds all ranks' chunks."""
        full, partition = call.full, call.partition

        def new() -> list[Array]:  # for each exchange in flight, space for a chunk of every other rank
            length = (self.size - 1) * starts.step
            return [self.streams.empty(length, full.dtype) for _ in range(self.backend.depth)]

        def exchange(start: int, buffer: Array) -> Exchange:
            step, part = starts.step, partition.span(self.rank, start, starts.step)
            length, contributes = part.stop - part.start, self.rank < call.contributors
            chunks = {
                rank: buffer[(rank - (rank > self.rank)) * step :][:length]
                for rank in reversed(self._others)
                if length and rank < call.contributors
            }
            sends = [(full[partition.span(rank, start, step)], [rank]) for rank in self._others]
            parts = chunks | ({self.rank: full[part]} if contributes else {})
            ordered = [parts[rank] for rank in sorted(parts)]
            add = partial(self.streams.add, call.out[start : start + length], ordered, call.accumulate)
            return Exchange(
                sends=[chunk for chunk in sends if chunk[0].size] if contributes else [],
                receives=[(chunk, rank) for rank, chunk in chunks.items()],
                then=add if length else None,
            )

        with loan(self._buffers[full.dtype], new) as buffers:
            exchanges = (exchange(start, buffers[n % len(buffers)]) for n, start in enumerate(starts))
            yield from self.backend.run(exchanges, tags)

    def _in_library(self, call: ReduceScatter) -> Running:
        """Reduce by a call of the library: one reduction at a time, in the same order on all ranks."""
        full, out, partition = call.full, call.out, call.partition
        if not call.accumulate:
            self.backend.sum_slices(full, out, partition)
            return
        make = partial(self.streams.empty, out.size, out.dtype)
        with loan(self._arrivals[out.size], make) as buffer:
            self.backend.sum_slices(full, buffer, partition)
            self.streams.add(out, [buffer], True)
            yield from self._added()

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
        call = ReduceScatter(array, array[partition.part(self.rank)], partition, self.size, accumulate=False)

        def running(tags: Iterator[int]) -> Running:
            yield from self._exact_sums(call, sums, tags)
            yield from self._added()
            yield from self.backend.run(self._gathers(None, array, partition, gathers), tags)

        return self._start(running, len(sums) + len(gathers), Result(array), "allreduce", label)

    def _added(self) -> Running:
        """Wait for launched sums, unless later work of the backend runs on the same stream, after them."""
        if not self.backend.in_order:
            yield completion(self.streams.mark())

    def broadcast(self, array: Array, root: int = 0, label: str = "") -> Handle:
        if on_host(array):
            return super().broadcast(array, root, label)
        flat = array.reshape(-1)
        starts = range(0, flat.size, self.backend.largest(array.itemsize, summed=False))
        chunks = (flat[start : start + starts.step] for start in starts)
        exchanges = (
            Exchange(sends=[(chunk, self._others)])
            if self.rank == root
            else Exchange(receives=[(chunk, root)])
            for chunk in chunks
        )
        running = partial(self.backend.run, exchanges)
        return self._start(running, len(starts), Result(array), "broadcast", label)

    def background(self) -> Comm:
        return DeviceAdoptingWrapper(self._inner.background(), self.streams)

    def shard_group(self) -> Comm:
        nodes = len(set(self.nodes()))
        if nodes > 1:
            raise UsageError(
                f"--strategy hybrid-shard: with --device cuda it works only on one node, found {nodes}; use "
                "full-shard"
            )
        return self

    def close(self) -> None:
        self.backend.close()
        super().close()
