"""Device memory by way of the host's: for every MPI library, and for several ranks on one GPU.

A round's pieces are copied into pinned memory, sent, received into pinned memory and copied back. Each of
these is the work of another part of the machine, so rounds overlap: while one is in the MPI library the next
is on its way to the host and the one before on its way back. A piece that goes to several ranks comes to the
host once. The pinned memory is cut once and used again; sums are always in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zero_mpi.comm.gpu.rounds import MPI, Round, arrived, as_message, lent, overlapped, passed
from zero_mpi.comm.gpu.streams import GpuSide
from zero_mpi.comm.kinds import STAGED
from zero_mpi.comm.partition import Partition
from zero_mpi.comm.scratch import LEAST_STAGE, STAGE_BYTES, STAGED_ALIGNED, STAGED_DEPTH
from zero_mpi.comm.transfer import Running
from zero_mpi.device import Done
from zero_mpi.device.types import Array


class Stage:
    """Pinned memory of a round; free when what it brought back last has arrived."""

    def __init__(self, side: GpuSide, nbytes: int) -> None:
        self.down, self.up = side.pinned(nbytes), side.pinned(nbytes)
        self.free: Any = Done()


class StagedWire:
    """Messages of pinned memory over a duplicate of `comm` (the world)."""

    in_order, kind = False, STAGED

    def __init__(
        self,
        side: GpuSide,
        comm: Any = None,
        *,
        stage_bytes: int = STAGE_BYTES,
        least_bytes: int = LEAST_STAGE,
        depth: int = STAGED_DEPTH,
    ) -> None:
        self.side, self.depth = side, depth
        self._comm = (MPI.COMM_WORLD if comm is None else comm).Dup()
        self._others = max(1, self._comm.Get_size() - 1)
        self._piece_bytes = max(least_bytes, stage_bytes // self._others)
        self._rings: list[list[Stage]] = []

    @property
    def about(self) -> str:
        """What a transfer takes, for people."""
        return (
            f"{self._piece_bytes * self._others * 2 * self.depth / 2**20:.0f} MiB of pinned memory a transfer"
        )

    def largest(self, itemsize: int, *, summed: bool) -> int:
        elements = max(1, self._piece_bytes // itemsize)
        return elements - elements % STAGED_ALIGNED if elements > STAGED_ALIGNED else elements

    def run(self, rounds: Iterator[Round], tags: Iterator[int]) -> Running:
        with lent(self._rings, self._new_ring) as ring:
            steps = (
                self._one(round_, next(tags), ring[number % self.depth])
                for number, round_ in enumerate(rounds)
            )
            yield from overlapped(steps, self.depth)

    def _new_ring(self) -> list[Stage]:
        return [Stage(self.side, self._piece_bytes * self._others) for _ in range(self.depth)]

    def _one(self, round_: Round, tag: int, stage: Stage) -> Running:
        yield passed(stage.free)
        leaving = self._fetch(round_, stage.down)
        fetched = self.side.fetched()
        coming = list(zip(round_.receives, cut(stage.up, [room for room, _ in round_.receives]), strict=True))
        requests = [self._comm.Irecv(as_message(pinned), source, tag) for (_, source), pinned in coming]
        yield passed(fetched)
        requests += [self._comm.Isend(as_message(pinned), target, tag) for pinned, target in leaving]
        yield arrived(self.side.adopt, requests)
        for (room, _), pinned in coming:
            self.side.bring(room, pinned)
        stage.free = self.side.mark()
        if round_.then is not None:
            round_.then()

    def _fetch(self, round_: Round, down: Array) -> list[tuple[Array, int]]:
        """Start to copy a round's pieces to the host. Returns where each is going to be, and its targets."""
        pieces = [piece for piece, _ in round_.sends]
        leaving = []
        for (piece, targets), pinned in zip(round_.sends, cut(down, pieces), strict=True):
            self.side.fetch(pinned, piece)
            leaving += [(pinned, target) for target in targets]
        return leaving

    def sum_slices(self, full: Array, target: Array, partition: Partition) -> None:
        raise AssertionError("sums are in the order of ranks")

    def sum_all(self, array: Array) -> None:
        raise AssertionError("sums are in the order of ranks")

    def close(self) -> None:
        self._comm.Free()


def cut(memory: Array, pieces: list[Array]) -> Iterator[Array]:
    """Room for each piece, one after the other."""
    start = 0
    for piece in pieces:
        assert start + piece.nbytes <= memory.nbytes, "a piece is longer than `largest`"
        yield memory[start : start + piece.nbytes]
        start += piece.nbytes
