"""Device memory by way of the host's: for every MPI library, and for several ranks on one GPU.

An exchange's pieces are copied into pinned memory, sent, received into pinned memory and copied back. Each of
these is the work of another part of the machine, so exchanges overlap: while one is in the MPI library the
next is on its way to the host and the one before on its way back. A piece that goes to several ranks comes to
the host once. The pinned memory is cut once and used again; sums are always in rank order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zero_mpi.comm.gpu.exchanges import MPI, Exchange, arrived, as_message, borrowed, overlapped, passed
from zero_mpi.comm.gpu.streams import GpuStreams
from zero_mpi.comm.kinds import STAGED
from zero_mpi.comm.partition import Partition
from zero_mpi.comm.scratch import LEAST_STAGE, STAGE_BYTES, STAGED_ALIGNED, STAGED_DEPTH
from zero_mpi.comm.transfer import Running
from zero_mpi.device import Done
from zero_mpi.device.types import Array


class PinnedBuffers:
    """Pinned memory of an exchange; free when what it brought back last has arrived."""

    def __init__(self, streams: GpuStreams, nbytes: int) -> None:
        self.down, self.up = streams.pinned(nbytes), streams.pinned(nbytes)
        self.free: Any = Done()


class StagedBackend:
    """Messages of pinned memory over a duplicate of `comm` (the world)."""

    in_order, kind = False, STAGED

    def __init__(
        self,
        streams: GpuStreams,
        comm: Any = None,
        *,
        stage_bytes: int = STAGE_BYTES,
        least_bytes: int = LEAST_STAGE,
        depth: int = STAGED_DEPTH,
    ) -> None:
        self.streams, self.depth = streams, depth
        self._comm = (MPI.COMM_WORLD if comm is None else comm).Dup()
        self._others = max(1, self._comm.Get_size() - 1)
        self._piece_bytes = max(least_bytes, stage_bytes // self._others)
        self._rings: list[list[PinnedBuffers]] = []

    @property
    def about(self) -> str:
        """The pinned memory that a transfer takes, for messages."""
        return (
            f"{self._piece_bytes * self._others * 2 * self.depth / 2**20:.0f} MiB of pinned memory per "
            "transfer"
        )

    def largest(self, itemsize: int, *, summed: bool) -> int:
        elements = max(1, self._piece_bytes // itemsize)
        return elements - elements % STAGED_ALIGNED if elements > STAGED_ALIGNED else elements

    def run(self, exchanges: Iterator[Exchange], tags: Iterator[int]) -> Running:
        with borrowed(self._rings, self._new_ring) as ring:
            steps = (
                self._one(exchange, next(tags), ring[number % self.depth])
                for number, exchange in enumerate(exchanges)
            )
            yield from overlapped(steps, self.depth)

    def _new_ring(self) -> list[PinnedBuffers]:
        return [PinnedBuffers(self.streams, self._piece_bytes * self._others) for _ in range(self.depth)]

    def _one(self, exchange: Exchange, tag: int, stage: PinnedBuffers) -> Running:
        yield passed(stage.free)
        leaving = self._fetch(exchange, stage.down)
        fetched = self.streams.fetched()
        rooms = cut(stage.up, [room for room, _ in exchange.receives])
        coming = list(zip(exchange.receives, rooms, strict=True))
        requests = [self._comm.Irecv(as_message(pinned), source, tag) for (_, source), pinned in coming]
        yield passed(fetched)
        requests += [self._comm.Isend(as_message(pinned), target, tag) for pinned, target in leaving]
        yield arrived(self.streams.adopt, requests)
        for (room, _), pinned in coming:
            self.streams.bring(room, pinned)
        stage.free = self.streams.mark()
        if exchange.then is not None:
            exchange.then()

    def _fetch(self, exchange: Exchange, down: Array) -> list[tuple[Array, int]]:
        """Start to copy an exchange's pieces to the host. Returns where each will be, and its targets."""
        pieces = [piece for piece, _ in exchange.sends]
        leaving = []
        for (piece, targets), pinned in zip(exchange.sends, cut(down, pieces), strict=True):
            self.streams.fetch(pinned, piece)
            leaving += [(pinned, target) for target in targets]
        return leaving

    def sum_slices(self, full: Array, target: Array, partition: Partition) -> None:
        raise AssertionError("sums are in rank order")

    def sum_all(self, array: Array) -> None:
        raise AssertionError("sums are in rank order")

    def close(self) -> None:
        self._comm.Free()


def cut(memory: Array, pieces: list[Array]) -> Iterator[Array]:
    """Yield consecutive parts of memory as buffers, one per chunk."""
    start = 0
    for piece in pieces:
        assert start + piece.nbytes <= memory.nbytes, "a piece is longer than `largest`"
        yield memory[start : start + piece.nbytes]
        start += piece.nbytes
