"""The interface of a transport: owners of slices, and collectives with separate start and wait.

Collectives return a `Handle`, except those described as blocking. Between the start and `wait()` the
caller may compute, but must not use the buffers. All ranks start the same collectives, and wait for them, in
the same order. `label` names the data that is sent, for records and error messages.
"""

# ruff: noqa: B027  (some methods that are not abstract do nothing)

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from zero_mpi.comm.kinds import MPI, Transport
from zero_mpi.comm.meter import Meter
from zero_mpi.comm.partition import Chunk, Partition
from zero_mpi.device.arrays import BufferPool
from zero_mpi.device.types import Array

SPINS = 200  # number of times that a wait yields its core before it sleeps, about 0.1 ms
SHORTEST, LONGEST = 2e-5, 2e-4  # seconds of the first and of the longest sleep


class Handle:
    """A collective in progress; `kind` and `label` name it in messages."""

    kind, label = "collective", ""

    def wait(self) -> None:
        """Return when the collective is complete and its buffers may be used."""

    def test(self) -> bool:
        """Advance the collective without blocking; return True if it is complete."""
        return True


class AllOf(Handle):
    """Several transfers that are waited for as one transfer."""

    def __init__(self, handles: Sequence[Handle], kind: str = "collective", label: str = "") -> None:
        self._handles, self.kind, self.label = handles, kind, label

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()

    def test(self) -> bool:
        return sum(not handle.test() for handle in self._handles) == 0  # unlike all(), it tests every handle


DONE = Handle()


@dataclass(frozen=True)
class ModuleMemory:
    """Memory that a transport provides for the units of a module.

    full      for each partition: an array that all ranks see, of which each rank writes its slice; None if
              slices are private
    buffers   pool of buffers for gradients before reduction
    gathers   pool of buffers for gathered parameters that have no shared array
    """

    full: list[Array | None]
    buffers: BufferPool
    gathers: BufferPool = field(default_factory=BufferPool)


@dataclass(frozen=True, eq=False)
class ReduceScatter:
    """Arguments of `Comm.reduce_scatter`."""

    full: Array
    out: Array
    partition: Partition
    contributors: int
    accumulate: bool
    label: str = ""


class Comm(ABC):
    """A transport: a group of ranks with their collectives, their nodes and the memory that they share."""

    rank: int
    size: int
    kind: Transport = MPI  # kind of this transport; default: MPI messages
    exact: bool  # whether reductions add in rank order, not in the library's order
    sums_in_place = False  # whether `out` may be `full` itself if a reduction does not accumulate
    replicates_by_node = False  # whether replicated state should be divided among the ranks of each node

    @property
    def about(self) -> str:
        """Description of the transport for messages."""
        return self.kind.name

    @cached_property
    def meter(self) -> Meter:
        return Meter()

    # ----------------------------------------------------------- arrays and small objects of all ranks

    @abstractmethod
    def allgather(self, shard: Array | None, full: Array, partition: Partition, label: str = "") -> Handle:
        """Fill `full` on all ranks from every rank's `shard`; if None, from the rank's slice of `full`."""

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
        """Set `out` to the sum over ranks of this rank's slice of `full`; add it to `out` if `accumulate`.

        Only ranks below `contributors` contribute: if exact, the `full` of other ranks is not read; if fast,
        it must be zeros. Exact sums are ((out + rank 0) + rank 1) + ..., one float32 addition after another.
        """
        ranks = self.size if contributors is None else contributors
        return self._reduce(ReduceScatter(full, out, partition, ranks, accumulate, label))

    def _reduce(self, call: ReduceScatter) -> Handle:
        """Start the reduction that `call` describes; see `reduce_scatter`."""
        raise NotImplementedError

    @abstractmethod
    def allreduce(self, array: Array, label: str = "") -> Handle:
        """Sum `array` over ranks, in place on all ranks; the library may choose the order."""

    @abstractmethod
    def broadcast(self, array: Array, root: int = 0, label: str = "") -> Handle:
        """Copy `array` from `root` to all ranks, in place."""

    @abstractmethod
    def gather(
        self, part: Array | None, buffer: Array | None, chunk: Chunk, root: int = 0, label: str = ""
    ) -> None:
        """Fill `buffer` on `root` with a chunk of a partition, from the `part` of every rank. Blocking."""

    @abstractmethod
    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        """Return every rank's small object `value` on `root`, in rank order; None elsewhere. Blocking."""

    @abstractmethod
    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the small object `value` of `root` on all ranks. Blocking."""

    @abstractmethod
    def allgather_object(self, value: Any) -> list[Any]:
        """Return every rank's small object `value`, in rank order. Blocking."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when all ranks have called `barrier`."""

    def progress(self) -> None:
        """Advance the transfers in progress; the runtime calls this between layers."""

    def sum_vector(self, values: Array) -> Array:
        """Return the sum over ranks of float64 vectors; each element must be non-zero on at most one rank.

        So every addition is x + 0, which is exact, and the result does not depend on the order.
        """
        total = np.array(values, np.float64)  # makes a copy, because the sum is in place
        self.allreduce(total, label="vector").wait()
        return total

    # ------------------------------------------ nodes, other groups and transports; all are collective

    @abstractmethod
    def background(self) -> Comm:
        """Return a transport of the same ranks for another thread; its waits sleep."""

    @abstractmethod
    def split(self, group: int) -> Comm:
        """Return a transport of the ranks that pass the same `group`, in rank order."""

    def nodes(self) -> list[int]:
        """Return the node number of each rank."""
        return [0] * self.size

    def shard_group(self) -> Comm:
        """Return a transport of this node's ranks, which together own all slices (HYBRID_SHARD).

        Collectives stay inside the node, but a reduction sums over the ranks of all nodes, and its
        `contributors` counts all these ranks. On a single node, return this transport. May raise UsageError.
        """
        return self

    def close(self) -> None:
        """Release the transport's resources; no transfer may be in progress."""

    # --------------------------------- arrays of a module that all ranks see; by default none

    def memory(
        self, full: Sequence[Partition], buffers: Sequence[int], gathers: Sequence[int] = ()
    ) -> ModuleMemory:
        """Return memory for a module: arrays in which ranks own slices, and gradient buffers. Collective.

        `buffers`, `gathers`: lengths in float32 elements of the gradients, and of the gathered units, that
        are in use at the same time. Raise UsageError if ranks share memory and there is not enough of it.
        """
        return ModuleMemory([None] * len(full), BufferPool())

    def signal_written(self) -> None:
        """Announce that this rank has finished writing its slices of shared arrays."""

    def wait_written(self) -> None:
        """Return when all ranks have called `signal_written` as often as this rank; arrays may be read."""

    def barrier_readers(self) -> None:
        """Return when all ranks that share arrays have called it; slices may then be written. Collective."""


def members_of(nodes: Sequence[int]) -> dict[int, list[int]]:
    """Return each node's ranks, ascending, given the node of each rank; nodes are in order of appearance."""
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    return members


def wait_until(ready: Callable[[], bool], crowded: bool) -> None:
    """Wait until `ready()` is true; another rank will soon make it so.

    If ranks share a core (`crowded`), a waiting rank delays the other rank, so it sleeps immediately.
    Yielding is not enough, because the scheduler may give the core to the same rank. Otherwise a wait usually
    takes microseconds, and only a long wait sleeps, so that other threads can run.
    """
    spins, pause = 0 if crowded else SPINS, SHORTEST
    while not ready():
        if spins:
            spins -= 1
            os.sched_yield()
        else:
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST)
