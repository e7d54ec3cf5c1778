"""A transport that leaves to another one all that it does not do in a better way itself."""

from __future__ import annotations

from typing import Any

from zero_mpi.comm.base import Comm, Handle
from zero_mpi.comm.clock_sync import Offset
from zero_mpi.comm.partition import Partition, Piece
from zero_mpi.device.types import Array


class CommWrapper(Comm):
    """Wrapper that hands every call on to `inner`; `wrapped` sees the handles of its transfers."""

    def __init__(self, inner: Comm) -> None:
        self._inner = inner
        self.rank, self.size, self.exact, self.meter = inner.rank, inner.size, inner.exact, inner.meter
        self.kind = inner.kind

    @property
    def about(self) -> str:
        return self._inner.about

    def wrapped(self, inner: Handle) -> Handle:
        """Return what the caller gets for a handle of the inner transport."""
        return inner

    def allgather(self, shard: Array | None, full: Array, partition: Partition, label: str = "") -> Handle:
        return self.wrapped(self._inner.allgather(shard, full, partition, label))

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
        handle = self._inner.reduce_scatter(
            full, out, partition, contributors=contributors, accumulate=accumulate, label=label
        )
        return self.wrapped(handle)

    def allreduce(self, array: Array, label: str = "") -> Handle:
        return self.wrapped(self._inner.allreduce(array, label))

    def broadcast(self, array: Array, root: int = 0, label: str = "") -> Handle:
        return self.wrapped(self._inner.broadcast(array, root, label))

    def gather(
        self, part: Array | None, room: Array | None, piece: Piece, root: int = 0, label: str = ""
    ) -> None:
        self._inner.gather(part, room, piece, root, label)

    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        return self._inner.gather_object(value, root)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return self._inner.broadcast_object(value, root)

    def allgather_object(self, value: Any) -> list[Any]:
        return self._inner.allgather_object(value)

    def barrier(self) -> None:
        self._inner.barrier()

    def clock_offset(self) -> Offset:
        return self._inner.clock_offset()

    def background(self) -> Comm:
        return self._inner.background()

    def split(self, group: int) -> Comm:
        return self._inner.split(group)

    def nodes(self) -> list[int]:
        return self._inner.nodes()

    def progress(self) -> None:
        self._inner.progress()

    def close(self) -> None:
        self._inner.close()
