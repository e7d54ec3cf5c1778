"""Device memory straight into an MPI library that takes it ("CUDA-aware").

Exact mode needs point-to-point messages only, which every such library can do; in some, nonblocking
reductions of device memory end the process. MPI knows no streams: an exchange's buffers are received into
only when the sums that read them are done, and the library's own reductions (`fast`) block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zero_mpi.comm.gpu.exchanges import MPI, Exchange, arrived, as_message, overlapped, passed
from zero_mpi.comm.gpu.streams import GpuStreams
from zero_mpi.comm.kinds import GPU_MPI
from zero_mpi.comm.partition import Partition
from zero_mpi.comm.scratch import AWARE_DEPTH, AWARE_PIECE
from zero_mpi.comm.transfer import Running
from zero_mpi.device.types import Array

MOST_BYTES = 1 << 30  # bytes in one message: counts are C ints in older interfaces


class CudaAwareBackend:
    """Messages of device memory over a duplicate of `comm` (the world). `largest`, `summed`: see above."""

    in_order, kind = False, GPU_MPI

    def __init__(
        self,
        streams: GpuStreams,
        comm: Any = None,
        *,
        most_bytes: int = MOST_BYTES,
        summed: int = AWARE_PIECE,
        depth: int = AWARE_DEPTH,
    ) -> None:
        self.streams, self.depth = streams, depth
        self._comm = (MPI.COMM_WORLD if comm is None else comm).Dup()
        self._most_bytes, self._summed = most_bytes, summed

    def largest(self, itemsize: int, *, summed: bool) -> int:
        most = max(1, self._most_bytes // itemsize)
        return min(most, self._summed) if summed else most

    def run(self, exchanges: Iterator[Exchange], tags: Iterator[int]) -> Running:
        read: dict[int, Any] = {}  # by room: the mark behind the sum that reads it
        steps = (
            self._one(exchange, next(tags), number % self.depth, read)
            for number, exchange in enumerate(exchanges)
        )
        yield from overlapped(steps, self.depth)
        for mark in read.values():  # the rooms go to the next reduction
            yield passed(mark)

    def _one(self, exchange: Exchange, tag: int, room: int, read: dict[int, Any]) -> Running:
        if room in read:
            yield passed(read.pop(room))
        yield arrived(self.streams.adopt, self._post(exchange, tag))
        if exchange.then is not None:
            exchange.then()
            read[room] = self.streams.mark()

    def _post(self, exchange: Exchange, tag: int) -> list[Any]:
        """Start the receives, then the sends; return their requests."""
        self.streams.adopt()
        requests = [self._comm.Irecv(as_message(room), source, tag) for room, source in exchange.receives]
        for piece, targets in exchange.sends:
            requests += [self._comm.Isend(as_message(piece), target, tag) for target in targets]
        return requests

    def sum_slices(self, full: Array, target: Array, partition: Partition) -> None:
        self.streams.adopt()
        for piece in partition.cut(self.largest(full.itemsize, summed=False)):
            given = [full[piece.start : piece.stop], MPI.FLOAT]
            room = [target[piece.of_slice(partition, self._comm.Get_rank())], MPI.FLOAT]
            self._comm.Reduce_scatter(given, room, piece.counts, MPI.SUM)

    def sum_all(self, array: Array) -> None:
        self.streams.adopt()
        step = self.largest(array.itemsize, summed=False)
        for start in range(0, array.size, step):
            self._comm.Allreduce(MPI.IN_PLACE, [array[start : start + step], MPI.FLOAT], MPI.SUM)

    def close(self) -> None:
        self._comm.Free()
