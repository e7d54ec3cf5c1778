"""The interface of a transport: who owns what, and collectives that start and finish separately.

Every collective returns a `Handle`; between its start and `wait()` the caller may compute, and must leave
the buffers alone. All ranks start, and wait for, the same collectives in the same order. `label` says what
travels, for records and error messages.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from zero_mpi.comm.clock_sync import Offset
from zero_mpi.comm.kinds import MPI, Transport
from zero_mpi.comm.meter import Meter
from zero_mpi.comm.partition import Partition, Piece
from zero_mpi.device.arrays import BufferPool
from zero_mpi.device.types import Array


class Handle:
    """A collective in progress; `kind` and `label` name it for those who wait."""

    kind, label = "collective", ""

    def wait(self) -> None:
        """Return when the collective is complete; its buffers may then be used."""

    def test(self) -> bool:
        """Push the collective on without blocking; return True when it is complete."""
        return True


class AllOf(Handle):
    """Several transfers that are waited for as one."""

    def __init__(self, handles: Sequence[Handle], kind: str = "collective", label: str = "") -> None:
        self._handles, self.kind, self.label = handles, kind, label

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()

    def test(self) -> bool:
        return sum(not handle.test() for handle in self._handles) == 0  # each must be pushed on


DONE = Handle()


@dataclass(frozen=True)
class ModuleMemory:
    """Memory that a transport gives a module for its units.

    wholes    for each requested partition: one array that all ranks see and each writes its slice of, or
              None if each rank keeps its slice to itself
    buffers   pool for gradients before they are reduced
    gathers   pool for gathered parameters that have no whole
    """

    wholes: list[Array | None]
    buffers: BufferPool
    gathers: BufferPool = field(default_factory=BufferPool)


class Comm(ABC):
    """A group of ranks and the collectives on flat arrays among them."""

    rank: int
    size: int
    exact: bool  # reductions add in rank order; otherwise the library chooses the order
    kind: Transport = MPI  # the kind of this transport; messages by default
    replicates_by_node = False  # replicated state is better dealt out to the ranks of each node
    sums_in_place = False  # `full` may be `out` before anything was added: one rank's sum is its own

    @property
    def about(self) -> str:
        """Description of what the transport uses, for messages."""
        return self.kind.name

    @cached_property
    def meter(self) -> Meter:
        """The meter of this rank's communication costs so far."""
        return Meter()

    @abstractmethod
    def allgather(self, shard: Array | None, full: Array, partition: Partition, label: str = "") -> Handle:
        """Fill `full` on all ranks from every rank's slice: `shard`, or None if it lies in `full`."""

    @abstractmethod
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
        """Set `out` to the sum over ranks of this rank's slice of their `full`, or add it if `accumulate`.

        Ranks from `contributors` on contribute nothing (their `full` is not read when exact; it must be zeros
        when fast). Exact: ((out + rank 0) + rank 1) + ..., one addition after the other in float32.
        """

    @abstractmethod
    def allreduce(self, array: Array, label: str = "") -> Handle:
        """Sum `array` over ranks, in place on all of them, in the library's order."""

    @abstractmethod
    def broadcast(self, array: Array, root: int = 0, label: str = "") -> Handle:
        """Copy `array` from `root` to all ranks, in place."""

    @abstractmethod
    def gather(
        self, part: Array | None, room: Array | None, piece: Piece, root: int = 0, label: str = ""
    ) -> None:
        """Fill `room` on `root` with a piece of a buffer, from the `part` of every rank; blocking."""

    @abstractmethod
    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        """Return every rank's `value` in rank order on `root`, else None; any small object; blocking."""

    @abstractmethod
    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return `value` of `root` on all ranks; any small object; blocking."""

    @abstractmethod
    def allgather_object(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order; any small object; blocking."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when all ranks have come here."""

    @abstractmethod
    def background(self) -> Comm:
        """Return a transport of the same ranks for another thread, whose waits sleep. Collective."""

    @abstractmethod
    def split(self, group: int) -> Comm:
        """Return a transport of the ranks that give the same number, in rank order. Collective."""

    def nodes(self) -> list[int]:
        """Return the node of each rank, by number. Collective."""
        return [0] * self.size

    def shard_group(self) -> Comm:
        """Return the ranks of this node as owners of slices that every node has (HYBRID_SHARD). Collective.

        Its collectives are those of the node, but a reduction sums over the ranks of all nodes, which
        `contributors` counts. On a single node it is the transport itself. Raises UsageError.
        """
        return self

    def memory(
        self, wholes: Sequence[Partition], buffers: Sequence[int], gathers: Sequence[int] = ()
    ) -> ModuleMemory:
        """Return memory for a module: arrays that ranks own slices of, and gradient buffers. Collective.

        `buffers`, `gathers`: lengths of all gradients and of all gathered units that are ever lent at once,
        float32 elements. Raises UsageError where ranks share memory and there is not enough of it.
        """
        return ModuleMemory([None] * len(wholes), BufferPool())

    def signal_written(self) -> None:  # noqa: B027  (nothing is shared)
        """Announce that this rank has completely written its slices of shared wholes."""

    def wait_written(self) -> None:  # noqa: B027
        """Return when every rank has published as often as this one: shared wholes may be read."""

    def barrier_readers(self) -> None:  # noqa: B027
        """Return when all ranks have come here, if they share wholes: slices may be written. Collective."""

    def clock_offset(self) -> Offset:
        """Return how far `time.perf_counter` here is ahead of rank 0's. Collective."""
        return Offset(0.0, 0.0, time.perf_counter())

    def progress(self) -> None:  # noqa: B027  (nothing to push is a sound answer)
        """Push the transfers in progress; the runtime calls it between layers."""

    def close(self) -> None:  # noqa: B027  (nothing to give up is a sound answer)
        """Release what the transport holds; nothing may be in progress. Collective."""

    def sum_vector(self, values: Array) -> Array:
        """Return the sum over ranks of float64 vectors; in each place at most one rank has a non-zero.

        Then every addition is x + 0, which is exact, and the result does not depend on the order.
        """
        total = np.array(values, np.float64)  # a copy: the sum is in place
        self.allreduce(total, label="vector").wait()
        return total
