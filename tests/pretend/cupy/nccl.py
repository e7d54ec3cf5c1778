"""NCCL without a GPU: CuPy's binding on host memory over MPI, asynchronous and in a stream's order.

Calls between groupStart and groupEnd run together, as in NCCL. Sums are added in MPI's order.
"""

import os
import threading
import time
from typing import Any

from mpi4py import MPI

from . import cuda

available = True
NCCL_UINT8, NCCL_FLOAT32, NCCL_SUM = 1, 7, 0
NCCL_UNIQUE_ID_BYTES = 128
TYPES = {NCCL_UINT8: MPI.BYTE, NCCL_FLOAT32: MPI.FLOAT}
_groups = threading.local()


def get_version() -> int:
    return 22703


def get_unique_id() -> bytes:
    return os.urandom(NCCL_UNIQUE_ID_BYTES)


def groupStart() -> None:
    assert getattr(_groups, "calls", None) is None, "the simulated NCCL has no nested groups"
    _groups.calls = []


def groupEnd() -> None:
    calls, _groups.calls = _groups.calls, None
    for stream in dict.fromkeys(stream for stream, _ in calls):
        launch(stream, [call for place, call in calls if place == stream])


def launch(stream: int, calls: list[Any]) -> None:
    """Run the calls of a group together in the stream's order; no call waits for another of its group."""

    def work() -> None:
        requests = [call() for call in calls]
        while not MPI.Request.Testall(requests):
            time.sleep(1e-5)

    cuda.Stream._all[stream].do(work)


def asked(stream: int, call: Any) -> None:
    """Launch a call, or record it until the end of the group."""
    calls = getattr(_groups, "calls", None)
    if calls is None:
        launch(stream, [call])
    else:
        calls.append((stream, call))


def message(place: int, count: int, datatype: int) -> list[Any]:
    kind = TYPES[datatype]
    return [MPI.buffer.fromaddress(place, count * kind.Get_size()), kind]


class NcclCommunicator:
    """Communicator of one rank, over all ranks of the world."""

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:
        assert isinstance(commId, bytes)
        assert len(commId) == NCCL_UNIQUE_ID_BYTES
        names = MPI.COMM_WORLD.allgather((ndev, commId))
        assert set(names) == {(MPI.COMM_WORLD.Get_size(), commId)}, "the ranks have different ids or numbers"
        assert rank == MPI.COMM_WORLD.Get_rank()
        self._comm = MPI.COMM_WORLD.Dup()

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        asked(stream, lambda: self._comm.Isend(message(sendbuf, count, datatype), peer))

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        asked(stream, lambda: self._comm.Irecv(message(recvbuf, count, datatype), peer))

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        assert sendbuf == recvbuf, "the simulated NCCL sums only in place"
        asked(stream, lambda: self._comm.Iallreduce(MPI.IN_PLACE, message(recvbuf, count, datatype), MPI.SUM))

    def reduce(
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int
    ) -> None:
        def call() -> Any:
            buffer = message(recvbuf, count, datatype) if self._comm.Get_rank() == root else None
            return self._comm.Ireduce(message(sendbuf, count, datatype), buffer, MPI.SUM, root)

        asked(stream, call)

    def reduceScatter(
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
    ) -> None:
        total = recvcount * self._comm.Get_size()

        def call() -> Any:
            buffer = message(recvbuf, recvcount, datatype)
            return self._comm.Ireduce_scatter_block(message(sendbuf, total, datatype), buffer, MPI.SUM)

        asked(stream, call)

    def destroy(self) -> None:
        cuda.Device().synchronize()
        self._comm.Free()
