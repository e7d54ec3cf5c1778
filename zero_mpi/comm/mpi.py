"""MPI transport: gathers call the library; exact reductions exchange slices and add them in order.

Exact reductions are at least as fast as Reduce_scatter, because their receive buffers stay in cache.
Parameters, gradients and control messages have separate communicators, so they cannot be mixed up.
"""

import time
from collections import defaultdict
from itertools import count
from typing import Any

import numpy as np

from zero_mpi import environment
from zero_mpi.arguments import instance
from zero_mpi.comm.base import DONE, Comm, Handle, ReduceScatter
from zero_mpi.comm.kinds import EXACT_CHUNK, EXACT_DEPTH
from zero_mpi.comm.partition import Chunk, Partition, others
from zero_mpi.comm.start_mpi import MPI, mpi_type
from zero_mpi.comm.topology import find_topology, node_communicator
from zero_mpi.comm.transfer import POLL_SECONDS, ProgressEngine, Running, Transfer
from zero_mpi.device.arrays import empty
from zero_mpi.device.ordered_sum import ordered_sum
from zero_mpi.device.types import Array
from zero_mpi.telemetry.spans import OpenTransfer as Record

TAGS = 1 << 14


class MPIComm(Comm):
    """The ranks of an MPI communicator, by default COMM_WORLD.

    exact     whether reductions add in rank order, not in the library's order
    threaded  whether a thread advances transfers while the rank computes; default: if that helps
    poll      seconds between two checks by the thread
    patient   whether waits sleep instead of spinning, for calls by a background thread
    """

    most = 1 << 30  # maximum number of elements in a message, because counts are C ints in older interfaces
    exact_chunk = EXACT_CHUNK
    fast_chunk = 1 << 20  # elements per library reduction: longer calls are several times slower

    def __init__(
        self,
        comm: Any = None,
        *,
        exact: bool = True,
        threaded: bool | None = None,
        poll: float = POLL_SECONDS,
        patient: bool = False,
    ) -> None:
        world = MPI.COMM_WORLD if comm is None else comm
        instance("MPIComm: comm", world, MPI.Comm, "a communicator of mpi4py")
        self.rank, self.size, self.exact = world.Get_rank(), world.Get_size(), exact
        self._parameters, self._gradients, self._control = world.Dup(), world.Dup(), world.Dup()
        self._patient = patient
        self._tags = count()
        self._scratch: dict[tuple[int, Any], list[Array]] = defaultdict(list)  # by contributors and type
        self._progress = ProgressEngine(self._thread_pays() if threaded is None else threaded, poll)

    def _thread_pays(self) -> bool:
        """Return whether a progress thread helps: MPI allows it, and a core is free or ranks span hosts."""
        node = self._control.Split_type(MPI.COMM_TYPE_SHARED)
        ranks_here = node.Get_size()
        node.Free()
        may_help = ranks_here < self.size or ranks_here < environment.node_cores()
        pays = may_help and self.size > 1 and MPI.Query_thread() == MPI.THREAD_MULTIPLE
        return all(self.allgather_object(pays))

    def start(self, running: Running, kind: str, label: str, record: Record | None = None) -> Handle:
        """Start a transfer, advanced by the progress engine; `record`: its collective's timeline record."""
        transfer = Transfer(running, self.meter, kind, label, record)
        if transfer.test():
            transfer.wait()  # the transfer is complete; this raises its error, if any
            return DONE
        self._progress.add(transfer)
        return transfer

    def progress(self) -> None:
        self._progress.push()

    def poke_progress(self) -> None:
        """Call the library, so that it sends messages that it still buffers after their requests ended."""
        self._control.Iprobe()

    def allgather(self, shard: Array | None, full: Array, partition: Partition, label: str = "") -> Handle:
        self.meter.sent_bytes += partition.counts[self.rank] * full.itemsize * (self.size - 1)

        def running() -> Running:
            kind, requests = mpi_type(full), []
            for chunk in partition.cut(self.most):
                send = MPI.IN_PLACE if shard is None else [shard[chunk.of_slice(partition, self.rank)], kind]
                receive = [full[chunk.start : chunk.stop], chunk.counts, chunk.offsets, kind]
                requests.append(self._parameters.Iallgatherv(send, receive))
            yield requests

        return self.start(running(), "allgather", label)

    def _reduce(self, call: ReduceScatter) -> Handle:
        if self.rank < call.contributors or not self.exact:
            self.meter.sent_bytes += call.partition.outside(self.rank) * call.full.itemsize
        running = self._exact_reduce(call) if self.exact else self._fast_reduce(call)
        return self.start(running, "reduce_scatter", call.label)

    def _exact_reduce(self, call: ReduceScatter) -> Running:
        """Reduce in rounds: post the next chunk, wait for the oldest, and add its slices in rank order."""
        full, partition, contributors = call.full, call.partition, call.contributors
        tag, size = next(self._tags) % TAGS, self.exact_chunk
        starts = range(0, max(partition.counts), size)
        free = self._scratch[contributors, full.dtype]  # buffers for one chunk from each contributor
        slots = [
            free.pop() if free else empty(contributors * size, full.dtype).reshape(contributors, size)
            for _ in starts[:EXACT_DEPTH]
        ]
        posted: list[list[Any]] = []
        for number in range(len(starts) + EXACT_DEPTH - 1):
            if number < len(starts):
                posted.append(self._post(full, slots[number % EXACT_DEPTH], partition, starts[number], tag))
            oldest = number - (EXACT_DEPTH - 1)
            if 0 <= oldest < len(starts):
                yield posted.pop(0)
                slot, start = slots[oldest % EXACT_DEPTH], starts[oldest]
                part = partition.span(self.rank, start, size)
                length = part.stop - part.start
                parts = [
                    full[part] if rank == self.rank else slot[rank, :length] for rank in range(contributors)
                ]
                ordered_sum(call.out[start : start + length], parts, call.accumulate)
        free.extend(slots)

    def _post(self, full: Array, slot: Array, partition: Partition, start: int, tag: int) -> list[Any]:
        """Post receives into `slot` (contributors, chunk), and then sends."""
        contributors, size = slot.shape
        part = partition.span(self.rank, start, size)
        length, kind = part.stop - part.start, mpi_type(full)
        neighbours = others(self.rank, self.size)
        requests = [
            self._gradients.Irecv([slot[source, :length], kind], source, tag)
            for source in reversed(neighbours)
            if length and source < contributors
        ]
        for owner in neighbours if self.rank < contributors else []:
            span = partition.span(owner, start, size)
            if span.stop > span.start:
                requests.append(self._gradients.Isend([full[span], kind], owner, tag))
        return requests

    def _fast_reduce(self, call: ReduceScatter) -> Running:
        full, kind, requests, pairs = call.full, mpi_type(call.full), [], []
        for chunk in call.partition.cut(self.fast_chunk):
            target = call.out[chunk.of_slice(call.partition, self.rank)]
            buffer = empty(target.size, full.dtype) if call.accumulate else target
            send = [full[chunk.start : chunk.stop], kind]
            requests.append(self._gradients.Ireduce_scatter(send, [buffer, kind], chunk.counts, MPI.SUM))
            pairs.append((target, buffer))
        yield requests
        if call.accumulate:
            for target, buffer in pairs:
                np.add(target, buffer, out=target)

    def allreduce(self, array: Array, label: str = "") -> Handle:
        self.meter.sent_bytes += array.nbytes if self.size > 1 else 0

        def running() -> Running:
            kind, step = mpi_type(array), self.fast_chunk
            yield [
                self._gradients.Iallreduce(MPI.IN_PLACE, [array[start : start + step], kind], MPI.SUM)
                for start in range(0, array.size, step)
            ]

        return self.start(running(), "allreduce", label)

    def broadcast(self, array: Array, root: int = 0, label: str = "") -> Handle:
        kind, flat = mpi_type(array), array.reshape(-1)

        def running() -> Running:
            yield [
                self._parameters.Ibcast([flat[start : start + self.most], kind], root)
                for start in range(0, flat.size, self.most)
            ]

        return self.start(running(), "broadcast", label)

    def gather(
        self, part: Array | None, buffer: Array | None, chunk: Chunk, root: int = 0, label: str = ""
    ) -> None:
        assert chunk.stop - chunk.start <= self.most, "expected a chunk of at most `most` elements"
        send = None if part is None else [part, mpi_type(part)]
        receive = None if buffer is None else [buffer, chunk.counts, chunk.offsets, mpi_type(buffer)]
        self._finish(self._parameters.Igatherv(send, receive, root), "gather", label)

    def _finish(self, request: Any, kind: str, label: str = "") -> None:
        """Wait for one request: block, or sleep so that other threads and ranks can use the cores."""
        with self.meter.waiting(kind, label):
            if not self._patient:
                request.Wait()
            while self._patient and not request.Test():
                time.sleep(POLL_SECONDS)

    def _gathering(self, kind: str) -> Any:
        """Return the communicator for objects; if patient, first wait for all ranks without spinning."""
        if self._patient:
            self._finish(self._control.Ibarrier(), kind)
        return self._control

    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        with self.meter.waiting("gather_object"):
            values: list[Any] | None = self._gathering("gather_object").gather(value, root)
        return values

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        with self.meter.waiting("broadcast_object"):
            return self._gathering("broadcast_object").bcast(value, root)

    def allgather_object(self, value: Any) -> list[Any]:
        with self.meter.waiting("allgather_object"):
            return list(self._gathering("allgather_object").allgather(value))

    def barrier(self) -> None:
        self._finish(self._control.Ibarrier(), "barrier")

    def background(self) -> Comm:
        return MPIComm(self._control, exact=self.exact, threaded=False, patient=True)

    def split(self, group: int) -> Comm:
        ranks = self._control.Split(group, self.rank)
        comm = MPIComm(ranks, threaded=False, patient=self._patient)
        ranks.Free()
        return comm

    def nodes(self) -> list[int]:
        node = node_communicator(self._control)
        members = find_topology(self._control, node).members
        node.Free()
        return [n for _, n in sorted((rank, n) for n, ranks in enumerate(members) for rank in ranks)]

    def close(self) -> None:
        self._progress.close()
        for comm in (self._parameters, self._gradients, self._control):
            comm.Free()
