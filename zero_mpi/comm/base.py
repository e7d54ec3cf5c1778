"""The interface of a transport: who owns what, and collectives that start and finish separately.

Every collective returns a `Handle`; between its start and `wait()` the caller may compute, and must leave
the buffers alone. All ranks start, and wait for, the same collectives in the same order. `label` says what
travels, for records and error messages.
"""

# ruff: noqa: B027  (to do nothing is a sound answer of methods that are not abstract)

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

SPINS = 200  # hand-overs of the core before the first sleep; about a tenth of a millisecond
SHORTEST, LONGEST = 2e-5, 2e-4  # seconds of sleep: the first one, and what they grow to


class Handle:
    """A collective under way; `kind` and `label` name it for those who wait."""

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

    full    for each requested partition: one array that all ranks see and each writes its slice of, or
              None where each rank keeps its slice to itself
    buffers   pool for gradients before they are reduced
    gathers   pool for gathered parameters without a shared array
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
    """A transport: a group of ranks, their collectives, their nodes and the memory that they share."""

    rank: int
    size: int
    kind: Transport = MPI  # the kind of this transport; messages by default
    exact: bool  # reductions add in the order of ranks; otherwise the library chooses the order
    sums_in_place = False  # `full` may be `out` before anything was added: one rank's sum is its own
    replicates_by_node = False  # replicated state is better dealt out to the ranks of each node

    @property
    def about(self) -> str:
        """A description, for people, of what the transport uses."""
        return self.kind.name

    @cached_property
    def meter(self) -> Meter:
        """The meter of this rank's communication costs so far."""
        return Meter()

    # ----------------------------------------------------------- arrays and small objects of all ranks

    @abstractmethod
    def allgather(self, shard: Array | None, full: Array, partition: Partition, label: str = "") -> Handle:
        """Fill `full` on all ranks from every rank's slice: `shard`, or None if it lies in `full`."""

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
        ranks = self.size if contributors is None else contributors
        return self._reduce(ReduceScatter(full, out, partition, ranks, accumulate, label))

    def _reduce(self, asked: ReduceScatter) -> Handle:
        """Start a reduction: `reduce_scatter` with all arguments given."""
        raise NotImplementedError

    @abstractmethod
    def allreduce(self, array: Array, label: str = "") -> Handle:
        """Sum `array` over ranks, in place on all of them, in the library's order."""

    @abstractmethod
    def broadcast(self, array: Array, root: int = 0, label: str = "") -> Handle:
        """Copy `array` from `root` to all ranks, in place."""

    @abstractmethod
    def gather(
        self, part: Array | None, buffer: Array | None, chunk: Chunk, root: int = 0, label: str = ""
    ) -> None:
        """Fill `buffer` on `root` with a chunk of a partition, from the `part` of every rank; blocking."""

    @abstractmethod
    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        """Return every rank's `value` in order of ranks on `root`, else None; any small object; blocking."""

    @abstractmethod
    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return `value` of `root` on all ranks; any small object; blocking."""

    @abstractmethod
    def allgather_object(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in order of ranks; any small object; blocking."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when all ranks have come here."""

    def progress(self) -> None:
        """Push the transfers under way; the runtime calls it between layers."""

    def sum_vector(self, values: Array) -> Array:
        """Return the sum over ranks of float64 vectors; in each place at most one rank has a non-zero.

        Then every addition is x + 0, which is exact, and the result does not depend on the order.
        """
        total = np.array(values, np.float64)  # a copy: the sum is in place
        self.allreduce(total, label="vector").wait()
        return total

    # ------------------------------------------ nodes, other groups and transports; all are collective

    @abstractmethod
    def background(self) -> Comm:
        """Return a transport of the same ranks for another thread, whose waits sleep."""

    @abstractmethod
    def split(self, group: int) -> Comm:
        """Return a transport of the ranks that give the same number, in the order of ranks."""

    def nodes(self) -> list[int]:
        """Return the node of each rank, by number."""
        return [0] * self.size

    def shard_group(self) -> Comm:
        """Return the ranks of this node as owners of slices that every node has (HYBRID_SHARD).

        Its collectives are those of the node, but a reduction sums over the ranks of all nodes, which
        `contributors` counts. On a single node it is the transport itself. Raises UsageError.
        """
        return self

    def close(self) -> None:
        """Release what the transport holds; nothing may be under way."""

    # --------------------------------- arrays of a module that all ranks see; here ranks share nothing

    def memory(
        self, full: Sequence[Partition], buffers: Sequence[int], gathers: Sequence[int] = ()
    ) -> ModuleMemory:
        """Return memory for a module: arrays that ranks own slices of, and gradient buffers. Collective.

        `buffers`, `gathers`: lengths of all gradients and of all gathered units that are ever lent at once,
        float32 elements. Raises UsageError where ranks share memory and there is not enough of it.
        """
        return ModuleMemory([None] * len(full), BufferPool())

    def signal_written(self) -> None:
        """Announce that this rank has completely written its slices of shared arrays."""

    def wait_written(self) -> None:
        """Return when every rank has published as often as this one: shared full may be read."""

    def barrier_readers(self) -> None:
        """Return when all ranks have come here, if they share arrays: slices may be written. Collective."""


def members_of(nodes: Sequence[int]) -> dict[int, list[int]]:
    """Return each node's ranks, ascending, from the node of each rank; nodes in order of appearance."""
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    return members


def wait_until(ready: Callable[[], bool], crowded: bool) -> None:
    """Return when `ready()` is true, which another rank will soon bring about.

    A waiting rank is in the way of the other one if they share a core (`crowded`): then it sleeps at once.
    Yielding the core without sleep is not enough, the scheduler may hand it back. Otherwise answers come
    within microseconds, and only a long wait turns to sleep, for the other threads' sake.
    """
    spins, pause = 0 if crowded else SPINS, SHORTEST
    while not ready():
        if spins:
            spins -= 1
            os.sched_yield()
        else:
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST)
