"""One process: the same path as many ranks, whose collectives are copies."""

from __future__ import annotations

from typing import Any

from zero_mpi.arrays import Array
from zero_mpi.comm.base import DONE, Comm, Handle, Partition, ordered_sum


class SerialComm(Comm):
    """A group of one rank; needs no MPI."""

    rank, size, exact = 0, 1, True

    def allgather(self, shard: Array | None, full: Array, partition: Partition, label: str = "") -> Handle:
        if shard is not None:
            full[...] = shard
        return DONE

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
        ordered_sum(out, [full] if contributors != 0 else [], accumulate)
        return DONE

    def allreduce(self, array: Array, label: str = "") -> Handle:
        return DONE

    def broadcast(self, array: Array, root: int = 0, label: str = "") -> Handle:
        return DONE

    def gather(
        self, shard: Array, full: Array | None, partition: Partition, root: int = 0, label: str = ""
    ) -> None:
        assert full is not None, "the root needs room for the whole buffer"
        full[...] = shard

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return value

    def allgather_object(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        pass
