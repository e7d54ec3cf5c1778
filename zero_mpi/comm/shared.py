"""Ranks of one node that share memory: parameters lie there once, gradients are added where they lie.

*Wholes.* A buffer whose slices the ranks own is one array for all of them. To gather it is to know that the
owners have written: each counts its writes (`publish`), and a reader waits until all have counted as far as
itself (`await_published`). Before slices are written again no rank may read them any more (`await_readers`).

*Reductions.* A rank announces that its gradient is complete and where it lies; an owner whose slice all ranks
have announced adds it, in order of ranks, and announces the sum. A reduction is complete when all owners have
added: then the buffers may be used again, and what the owners wrote may be read. The bits are those of the
exact reduction over MPI, since the additions are. Nobody works for another rank, and there is no thread:
sums are made when the runtime tests between layers, or waits.

All ranks do these things in the same order, so a number identifies each. Everything else goes over MPI.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpi4py import MPI

from zero_mpi.arrays import Array
from zero_mpi.comm.base import DONE, Comm, Handle, Memory, Partition, Piece, ordered_sum
from zero_mpi.comm.counters import ENTRIES, POSTED, PUBLISHED, SUMMED, Counters
from zero_mpi.comm.files import OutputFile
from zero_mpi.comm.mpi import MPIComm
from zero_mpi.comm.patience import wait_until
from zero_mpi.comm.slots import FLOAT, SlotPool, padded
from zero_mpi.comm.window import NodesApart, NoSharedMemory, Window

SUM_PIECE = 1 << 15  # elements that are added over all ranks before the next ones: 128 KiB stay in cache
Request = tuple[tuple[Partition, ...], tuple[int, ...]]


@dataclass(eq=False)
class Reduction(Handle):
    """Number `number` of the reductions: sums this rank's slice of `full` into `out`."""

    comm: SharedComm
    number: int
    pool: SlotPool
    full: Array
    out: Array
    partition: Partition
    contributors: int
    accumulate: bool

    def test(self) -> bool:
        self.comm.progress()
        return self.comm.is_complete(self.number)

    def wait(self) -> None:
        self.comm.wait_until(lambda: self.comm.is_complete(self.number))

    def add(self) -> None:
        """Add the slices that lie where the ranks said; call it once all of them have."""
        mine = self.partition.part(self.comm.rank)
        parts = [
            self.pool.of_rank(rank, self.comm.place(rank, self.number), self.full, mine)
            for rank in range(self.contributors)
        ]
        for start in range(0, mine.stop - mine.start, SUM_PIECE):
            piece = slice(start, start + SUM_PIECE)
            ordered_sum(self.out[piece], [part[piece] for part in parts], self.accumulate)


@dataclass(eq=False)
class OverMPI(Handle):
    """A transfer of the inner transport; whoever waits for it goes on with its sums meanwhile.

    Another rank may need them to get as far as this one.
    """

    comm: SharedComm
    inner: Handle

    def test(self) -> bool:
        self.comm.progress()
        return self.inner.test()

    def wait(self) -> None:
        if self.comm.sums_are_due:
            self.comm.wait_until(lambda: not self.comm.sums_are_due or self.inner.test())
        self.inner.wait()


class SharedComm(Comm):
    """The ranks of an MPI communicator (the world, unless another is given), all of one node.

    `wholes`, `buffers`: what `memory` will be asked for first; it is set aside at once. Collective; raises
    NoSharedMemory on all ranks alike where the ranks are on several nodes or there is not enough memory.
    """

    exact = True  # also where `fast` would do: the library has no faster sum

    def __init__(
        self,
        comm: Any = None,
        *,
        wholes: Sequence[Partition] = (),
        buffers: Sequence[int] = (),
        threaded: bool | None = None,
    ) -> None:
        world = MPI.COMM_WORLD if comm is None else comm
        self.rank, self.size = world.Get_rank(), world.Get_size()
        self._node = world.Split_type(MPI.COMM_TYPE_SHARED)  # on one node: the same ranks in the same order
        nodes = world.allreduce(1 if self._node.Get_rank() == 0 else 0)
        try:
            if nodes > 1:
                raise NodesApart(f"the ranks are on {nodes} nodes, and memory is shared within one")
            self._counters = Counters(self._node)
        except NoSharedMemory:
            self._node.Free()
            raise
        self._inner = MPIComm(world, threaded=threaded)
        self.meter = self._inner.meter
        self._crowded = self.size > len(os.sched_getaffinity(0))
        self._started = self._writes = 0  # reductions; times that this rank has published
        self._due: deque[Reduction] = deque()  # reductions that this rank has not added yet
        self._windows: list[Window] = []
        self._pools: list[weakref.ref[SlotPool]] = []
        self._prepared: tuple[Request, Memory] | None = None
        try:
            if wholes or buffers:
                self._prepared = (tuple(wholes), tuple(buffers)), self._allot(wholes, buffers)
        except NoSharedMemory:
            self.close()
            raise

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Push on what is under way until `ready()`."""

        def pushed() -> bool:
            self.progress()
            return ready()

        with self.meter:
            wait_until(pushed, self._crowded)

    def progress(self) -> None:
        self._add_what_is_posted()
        self._inner.progress()

    # ------------------------------------------------------------------------------------------- memory

    def memory(self, wholes: Sequence[Partition], buffers: Sequence[int]) -> Memory:
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] == (tuple(wholes), tuple(buffers)):
            return prepared[1]
        prepared = None
        self._free_unused()
        return self._allot(wholes, buffers)

    def _allot(self, wholes: Sequence[Partition], buffers: Sequence[int]) -> Memory:
        """One window: first the wholes, then a block of buffers for each rank."""
        starts = list(itertools.accumulate((padded(whole.length) for whole in wholes), initial=0))
        block = sum(padded(length) for length in buffers)
        blocks = [starts[-1] + rank * block for rank in range(self.size + 1)]
        slices = [
            (start + FLOAT.itemsize * part.start, start + FLOAT.itemsize * part.stop)
            for start, part in zip(starts, (whole.part(self.rank) for whole in wholes), strict=False)
        ]
        window = Window(self._node, max(1, blocks[-1]), [*slices, (blocks[self.rank], blocks[self.rank + 1])])
        memory = window.hand_over()
        for first, last in slices:
            memory[first:last] = 0
        arrays: list[Array | None] = [
            memory[start : start + FLOAT.itemsize * whole.length].view(FLOAT)
            for start, whole in zip(starts, wholes, strict=False)
        ]
        pool = SlotPool([memory[start : start + block] for start in blocks[:-1]], self.rank, buffers)
        self._windows.append(window)
        self._pools = [known for known in self._pools if known() is not None] + [weakref.ref(pool)]
        return Memory(arrays, pool)

    def _free_unused(self) -> None:
        """Free the windows in which no rank has an array any more: modules that are gone. Collective."""
        used = self._node.allgather([window.in_use for window in self._windows])
        for window, in_use in zip(self._windows[:], zip(*used, strict=True), strict=True):
            if not any(in_use):
                window.free()
                self._windows.remove(window)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that all ranks together have now."""
        return self._counters.nbytes + sum(window.nbytes for window in self._windows)

    # ---------------------------------------------------------------------------------------- gathering

    def publish(self) -> None:
        self._writes += 1
        self._counters.raise_to(PUBLISHED, self._writes)

    def await_published(self) -> None:
        if not self._counters.all_reached(PUBLISHED, self._writes):
            self.wait_until(lambda: self._counters.all_reached(PUBLISHED, self._writes))

    def await_readers(self) -> None:
        self._inner.barrier()

    # --------------------------------------------------------------------------------------- reductions

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
        contributors = self.size if contributors is None else contributors
        pool, offset = self._find(full)
        if pool is None:
            return self._over_mpi(
                self._inner.reduce_scatter(
                    full, out, partition, contributors=contributors, accumulate=accumulate, label=label
                )
            )
        if self.rank < contributors:
            self.meter.sent_bytes += partition.outside(self.rank) * full.itemsize
        number, self._started = self._started, self._started + 1
        if number >= ENTRIES:  # its entry of the table is used again
            self.wait_until(lambda: self.is_complete(number - ENTRIES))
        reduction = Reduction(self, number, pool, full, out, partition, contributors, accumulate)
        self._due.append(reduction)
        self._counters.note(number, offset)
        self._counters.raise_to(POSTED, number + 1)
        self._add_what_is_posted()
        return reduction

    def _find(self, full: Array) -> tuple[SlotPool | None, int]:
        """The pool that an array is of, and where in this rank's block it begins."""
        for known in self._pools:
            pool = known()
            offset = None if pool is None else pool.offset(full)
            if offset is not None:
                return pool, offset
        return None, 0

    def place(self, rank: int, number: int) -> int:
        """Where in its block a rank has the gradient of a reduction that it announced."""
        return self._counters.noted(rank, number)

    @property
    def sums_are_due(self) -> bool:
        """Whether this rank has reductions that it has not added yet."""
        return bool(self._due)

    def _add_what_is_posted(self) -> None:
        """Add the slices of reductions that all ranks have announced, in their order.

        All ranks, not only those that contribute: one that is behind may still read what `out` held (the
        summed gradient by which it updates its parameters, where these are replicated).
        """
        while self._due and self._counters.all_reached(POSTED, self._due[0].number + 1):
            reduction = self._due.popleft()
            reduction.add()
            self._counters.raise_to(SUMMED, reduction.number + 1)

    def is_complete(self, number: int) -> bool:
        """Whether all ranks have added their slices of a reduction."""
        return self._counters.all_reached(SUMMED, number + 1)

    # ----------------------------------------------------------------------------------------- over MPI

    def _over_mpi(self, inner: Handle) -> Handle:
        return DONE if inner is DONE else OverMPI(self, inner)

    def allgather(self, shard: Array | None, full: Array, partition: Partition, label: str = "") -> Handle:
        return self._over_mpi(self._inner.allgather(shard, full, partition, label))

    def allreduce(self, array: Array, label: str = "") -> Handle:
        return self._over_mpi(self._inner.allreduce(array, label))

    def broadcast(self, array: Array, root: int = 0, label: str = "") -> Handle:
        return self._over_mpi(self._inner.broadcast(array, root, label))

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

    def background(self) -> Comm:
        return self._inner.background()

    def create_file(self, path: Path) -> OutputFile:
        return self._inner.create_file(path)

    def close(self) -> None:
        """Free the windows, but for those in which arrays still lie: these stay to the end of the process."""
        self._prepared = None
        self._free_unused()
        self._counters.close()
        self._node.Free()
        self._inner.close()
