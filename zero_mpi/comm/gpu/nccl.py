"""Device memory by NCCL, where the user asks for it: all in the order of one stream, without the host.

In exact mode NCCL only moves data, by groups of sends and receives; the sums are computed here. With `fast`
it adds, in an order of its own; slices of unequal lengths are then reduced to one owner after the other, in a
group. Ranks meet through MPI, which also carries everything that is not on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from zero_mpi.comm.gpu.exchanges import MPI, Exchange
from zero_mpi.comm.gpu.streams import GpuStreams
from zero_mpi.comm.kinds import NCCL
from zero_mpi.comm.partition import Partition
from zero_mpi.comm.scratch import NCCL_DEPTH, NCCL_PIECE
from zero_mpi.comm.transfer import Running
from zero_mpi.device.arrays import address
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError


def load() -> Any:
    """Return CuPy's binding of NCCL. Raises UsageError where there is no NCCL."""
    from cupy.cuda import nccl

    if not nccl.available:
        raise UsageError(
            "--transport nccl: CuPy finds no NCCL; pip install nvidia-nccl-cu12 (or -cu13), load your site's "
            "module, or use --transport auto"
        )
    return nccl


class NcclBackend:
    """NCCL among the ranks of the world. Collective; raises UsageError on all ranks alike."""

    in_order, kind, depth = True, NCCL, NCCL_DEPTH

    def __init__(self, streams: GpuStreams, *, summed: int = NCCL_PIECE) -> None:
        self.streams, self._summed = streams, summed
        world = MPI.COMM_WORLD
        self._rank, self._size = world.Get_rank(), world.Get_size()
        self._nccl = together(world, load)
        name = world.bcast(self._nccl.get_unique_id() if self._rank == 0 else None)
        streams.adopt()
        self._comm = together(world, lambda: self._join(name))

    def _join(self, name: Any) -> Any:
        """Return NCCL's communicator. All ranks call this at once; NCCL fails on all of them or on none."""
        try:
            return self._nccl.NcclCommunicator(self._size, name, self._rank)
        except RuntimeError as error:
            raise UsageError(
                f"--transport nccl: NCCL does not start ({error}); it needs one GPU per rank; see "
                "NCCL_DEBUG=INFO, or use --transport auto"
            ) from error

    @property
    def version(self) -> str:
        """The version of NCCL, as text."""
        number = self._nccl.get_version()
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    def largest(self, itemsize: int, *, summed: bool) -> int:
        return self._summed if summed else 1 << 62  # counts are size_t

    def run(self, exchanges: Iterator[Exchange], tags: Iterator[int]) -> Running:
        """Launch everything at once: the order is the stream's, and the same on all ranks."""
        for exchange in exchanges:
            next(tags)
            if exchange.sends or exchange.receives:
                self._exchange(exchange)
            if exchange.then is not None:
                exchange.then()
        yield from ()

    def _exchange(self, exchange: Exchange) -> None:
        nccl, stream = self._nccl, self.streams.stream.ptr
        nccl.groupStart()
        for piece, targets in exchange.sends:
            for target in targets:
                self._comm.send(address(piece), piece.nbytes, nccl.NCCL_UINT8, target, stream)
        for room, source in exchange.receives:
            self._comm.recv(address(room), room.nbytes, nccl.NCCL_UINT8, source, stream)
        nccl.groupEnd()

    def sum_slices(self, full: Array, target: Array, partition: Partition) -> None:
        nccl, stream = self._nccl, self.streams.stream.ptr
        kind, add = nccl.NCCL_FLOAT32, nccl.NCCL_SUM
        if len(set(partition.counts)) == 1:
            self._comm.reduceScatter(address(full), address(target), target.size, kind, add, stream)
            return
        nccl.groupStart()
        for owner, length in enumerate(partition.counts):
            if length:
                given = address(full[partition.part(owner)])
                self._comm.reduce(given, address(target), length, kind, add, owner, stream)
        nccl.groupEnd()

    def sum_all(self, array: Array) -> None:
        nccl, stream = self._nccl, self.streams.stream.ptr
        place = address(array)
        self._comm.allReduce(place, place, array.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream)

    def close(self) -> None:
        self._comm.destroy()


def together(world: Any, action: Callable[[], Any]) -> Any:
    """Return action() of this rank; where it raises UsageError on one rank, all raise it."""
    result, problem = None, None
    try:
        result = action()
    except UsageError as error:
        problem = str(error)
    for found in world.allgather(problem):
        if found is not None:
            raise UsageError(found)
    return result
