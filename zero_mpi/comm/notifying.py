"""A transport that hears of each collective before another one starts it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from zero_mpi.comm.base import Comm, Handle
from zero_mpi.comm.partition import Partition, Piece
from zero_mpi.comm.wrapper import CommWrapper
from zero_mpi.device.types import Array


def _heard(name: str, about: Callable[..., tuple[str, ...]] = lambda *given: ()) -> Any:
    """Make a method that hands a collective on after a word; `about`: what its arguments must have alike."""

    def method(self: NotifyingWrapper, *given: Any, **named: Any) -> Any:
        self.on_collective(name, "", *about(*given, **named))
        return getattr(self._inner, name)(*given, **named)

    return method


class NotifyingWrapper(CommWrapper):
    """Hands every call on to `inner`, after `on_collective` of those that are collective."""

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self.sums_in_place, self.replicates_by_node = inner.sums_in_place, inner.replicates_by_node
        self._owners: tuple[Comm, Comm] | None = None  # those of the inner transport, and what hears of them

    @abstractmethod
    def on_collective(self, kind: str, label: str = "", *about: Array | Partition | str) -> None:
        """A collective is about to start: what all ranks must have alike. Arrays come as they are: it is
        their size and type that must be, and most who listen need not spell them out."""

    @abstractmethod
    def beside(self, other: Comm) -> Comm:
        """This kind of wrapper around another transport of these ranks, or of some of them. Collective."""

    # -------------------------------------------------------------------------------------- on arrays

    def allgather(self, shard: Array | None, full: Array, partition: Partition, label: str = "") -> Handle:
        self.on_collective(
            "allgather", label, full, partition, "its slices in place" if shard is None else "from slices"
        )
        return self._inner.allgather(shard, full, partition, label)

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
        given = f"{self.size if contributors is None else contributors} contributors"
        how = "added to what is there" if accumulate else "from zero"
        self.on_collective("reduce_scatter", label, full, partition, given, how)
        return self._inner.reduce_scatter(
            full, out, partition, contributors=contributors, accumulate=accumulate, label=label
        )

    def allreduce(self, array: Array, label: str = "") -> Handle:
        self.on_collective("allreduce", label, array)
        return self._inner.allreduce(array, label)

    def broadcast(self, array: Array, root: int = 0, label: str = "") -> Handle:
        self.on_collective("broadcast", label, array, f"root {root}")
        return self._inner.broadcast(array, root, label)

    def gather(
        self, part: Array | None, room: Array | None, piece: Piece, root: int = 0, label: str = ""
    ) -> None:
        self.on_collective("gather", label, f"elements {piece.start} to {piece.stop}", f"root {root}")
        self._inner.gather(part, room, piece, root, label)

    # ------------------------------------------------------------------------------------ on anything

    sum_vector = _heard("sum_vector", lambda values: (f"shape {np.shape(values)}",))  # sent as float64
    gather_object = _heard("gather_object", lambda value, root=0: (f"root {root}",))
    broadcast_object = _heard("broadcast_object", lambda value, root=0: (f"root {root}",))
    allgather_object, barrier, barrier_readers, clock_offset, nodes, close = map(
        _heard, ("allgather_object", "barrier", "barrier_readers", "clock_offset", "nodes", "close")
    )
    memory = _heard(
        "memory",
        lambda wholes, buffers, gathers=(): (
            f"wholes {[whole.length for whole in wholes]}",
            f"buffers {list(buffers)}",
            f"gathers {list(gathers)}",
        ),
    )

    def background(self) -> Comm:
        self.on_collective("background")
        return self.beside(self._inner.background())

    def split(self, group: int) -> Comm:
        self.on_collective("split")
        return self.beside(self._inner.split(group))

    def shard_group(self) -> Comm:
        self.on_collective("shard_group")
        owners = self._inner.shard_group()
        if owners is self._inner:
            return self
        if self._owners is None or self._owners[0] is not owners:
            self._owners = owners, self.beside(owners)
        return self._owners[1]

    def signal_written(self) -> None:
        self._inner.signal_written()

    def wait_written(self) -> None:
        self._inner.wait_written()
