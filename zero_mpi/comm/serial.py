"""Transport for one process, which runs the same code as several ranks. Its collectives only copy or add."""

from collections.abc import Sequence
from typing import Any

from zero_mpi import device
from zero_mpi.comm.base import DONE, Comm, Handle, ModuleMemory, ReduceScatter
from zero_mpi.comm.kinds import SERIAL
from zero_mpi.comm.partition import Chunk, Partition
from zero_mpi.device.arrays import BufferPool, address
from zero_mpi.device.ordered_sum import ordered_sum
from zero_mpi.device.types import Array


class SerialComm(Comm):
    """A group of one rank, which needs no MPI."""

    rank, size, exact, sums_in_place = 0, 1, True, True
    kind = SERIAL

    def memory(
        self, full: Sequence[Partition], buffers: Sequence[int], gathers: Sequence[int] = ()
    ) -> ModuleMemory:
        zeros = device.in_use().zeros
        return ModuleMemory([zeros(part.length) for part in full], BufferPool())  # the slice is all of it

    def allgather(self, shard: Array | None, full: Array, partition: Partition, label: str = "") -> Handle:
        if shard is not None:
            full[...] = shard
        return DONE

    def _reduce(self, call: ReduceScatter) -> Handle:
        if address(call.full) != address(call.out):
            ordered_sum(call.out, [call.full] if call.contributors else [], call.accumulate)
        return DONE

    def allreduce(self, array: Array, label: str = "") -> Handle:
        return DONE

    def broadcast(self, array: Array, root: int = 0, label: str = "") -> Handle:
        return DONE

    def gather(
        self, part: Array | None, buffer: Array | None, chunk: Chunk, root: int = 0, label: str = ""
    ) -> None:
        assert buffer is not None, "the root needs a buffer for the chunk"
        buffer[...] = part

    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        return [value]

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return value

    def allgather_object(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        pass

    def background(self) -> Comm:
        return self

    def split(self, group: int) -> Comm:
        return self
