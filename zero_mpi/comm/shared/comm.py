"""Transport for ranks that share a node's memory: parameters are stored once, gradients added in place.

*Full arrays.* An array in which ranks own slices exists once for all ranks. A gather waits until the owners
have written: each rank counts its writes (`signal_written`), and a reader waits until all ranks' counts have
reached the reader's (`wait_written`). Before slices are written again, all ranks must have finished reading
them (`barrier_readers`).

*Reductions.* A rank announces the position of its complete gradient. When all have done so, each owner
adds its slice in rank order and announces the sum. A reduction is complete when all owners have done that.
Then the buffers may be used again, and the sums may be read. The additions are those of the exact reduction
over MPI, so sums are bit-identical. No rank works for another rank, and no thread adds in the background: a
rank adds when the runtime tests between layers, or when it waits.

All ranks start these operations in the same order, so each operation has a number. Other messages use MPI.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zero_mpi.comm.base import DONE, Handle, ModuleMemory, ReduceScatter
from zero_mpi.comm.kinds import ENTRIES, POSTED, SHARED, SUMMED
from zero_mpi.comm.mpi import MPIComm
from zero_mpi.comm.partition import Partition
from zero_mpi.comm.shared.memory import NodeMemory, NodesApart, SharedGradientPool
from zero_mpi.comm.start_mpi import MPI
from zero_mpi.comm.topology import node_communicator
from zero_mpi.comm.wrapper import ProgressingHandle, ProgressingWrapper
from zero_mpi.device.ordered_sum import ordered_sum
from zero_mpi.telemetry import spans
from zero_mpi.telemetry.spans import OpenTransfer as Record

SUM_CHUNK = 1 << 15  # elements that are added over all ranks at a time: 128 KiB, which fit in cache


@dataclass(eq=False)
class Reduction(Handle):
    """Reduction `number` of a transport, whose gradients are in `pool`."""

    comm: SharedComm
    number: int
    pool: SharedGradientPool
    call: ReduceScatter
    record: Record | None  # record of the collective for the timeline
    kind = "reduce_scatter"

    def test(self) -> bool:
        self.comm.progress()
        return self.comm.is_complete(self.number)

    def wait(self) -> None:
        self.comm.wait_until(lambda: self.comm.is_complete(self.number), self.kind, self.call.label)
        self.comm.note_ends()

    def add(self) -> None:
        """Add this rank's slice of the announced gradients; all ranks must have announced theirs."""
        call, span = self.call, self.call.partition.part(self.comm.rank)
        parts = [
            self.pool.of_rank(rank, self.comm.counters.noted(rank, self.number), call.full, span)
            for rank in range(call.contributors)
        ]
        for start in range(0, span.stop - span.start, SUM_CHUNK):
            chunk = slice(start, start + SUM_CHUNK)
            ordered_sum(call.out[chunk], [part[chunk] for part in parts], call.accumulate)


class OverMPI(ProgressingHandle):
    """Handle of a transfer of the inner transport; a rank that waits for it also adds its reductions.

    Another rank may need these sums before it can start the same transfer.
    """

    def __init__(self, comm: SharedComm, inner: Handle) -> None:
        super().__init__(comm, inner)
        self._due = comm.due

    def wait(self) -> None:
        if self._due:
            self._comm.wait_until(lambda: not self._due or self._inner.test(), self.kind, self.label)
        self._inner.wait()


class SharingWrapper(ProgressingWrapper):
    """Wrapper over MPI messages that keeps modules' arrays in the node's shared memory, if there is any."""

    def __init__(self, inner: MPIComm, ranks_here: int, node_memory: NodeMemory | None) -> None:
        super().__init__(inner, ranks_here)
        self.node_memory = node_memory

    def memory(
        self, full: Sequence[Partition], buffers: Sequence[int], gathers: Sequence[int] = ()
    ) -> ModuleMemory:
        if self.node_memory is None:
            return super().memory(full, buffers, gathers)
        arrays, pool = self.node_memory.allot(full, buffers)
        return ModuleMemory(list(arrays), pool)

    def signal_written(self) -> None:
        if self.node_memory is not None:
            self.node_memory.signal_written()

    def wait_written(self) -> None:
        if self.node_memory is not None and not self.node_memory.all_written():
            self.wait_until(self.node_memory.all_written, "updated parameters")

    def barrier_readers(self) -> None:
        if self.node_memory is not None:
            self._inner.barrier()


class SharedComm(SharingWrapper):
    """The ranks of an MPI communicator, by default COMM_WORLD, which must all be on one node.

    `full`, `buffers`: arguments of the first call of `memory`, for which memory is reserved now. Collective;
    raises NoSharedMemory on all ranks if the ranks are on several nodes or there is not enough memory.
    """

    def __init__(
        self,
        comm: Any = None,
        *,
        full: Sequence[Partition] = (),
        buffers: Sequence[int] = (),
        threaded: bool | None = None,
    ) -> None:
        world = MPI.COMM_WORLD if comm is None else comm
        node = node_communicator(world)  # has the same ranks in the same order if all are on one node
        nodes = world.allreduce(1 if node.Get_rank() == 0 else 0)
        if nodes > 1:
            node.Free()
            raise NodesApart(f"the ranks are on {nodes} nodes, but shared memory needs one node")
        self._memory = NodeMemory(node, full, buffers)
        super().__init__(MPIComm(world, threaded=threaded), self._memory.size, self._memory)
        self.kind, self.exact = SHARED, True  # also with --reduction fast, as the library's sum is not faster
        self.counters = self._memory.counters
        self._started = 0  # number of started reductions
        self.due: deque[Reduction] = deque()  # reductions that this rank has not added yet
        self._recorded: deque[Reduction] = deque()  # reductions in progress that a timeline records

    def progress(self) -> None:
        self._add_what_is_posted()
        if self._recorded:
            self.note_ends()
        self._inner.progress()

    def wrapped(self, inner: Handle) -> Handle:
        return DONE if inner is DONE else OverMPI(self, inner)

    @property
    def shared_bytes(self) -> int:
        return self._memory.nbytes

    @property
    def about(self) -> str:
        return f"shared, {self.shared_bytes / 2**20:.1f} MiB of the node's shared memory"

    def _reduce(self, call: ReduceScatter) -> Handle:
        pool, offset = self._memory.find(call.full)
        if pool is None:
            return super()._reduce(call)
        if self.rank < call.contributors:
            self.meter.sent_bytes += call.partition.outside(self.rank) * call.full.itemsize
        number, self._started = self._started, self._started + 1
        if number >= ENTRIES:  # reuses an entry of the table
            self.wait_until(lambda: self.is_complete(number - ENTRIES), "reduce_scatter", "an earlier round")
        record = self.meter.transfer("reduce_scatter", call.label)
        reduction = Reduction(self, number, pool, call, record)
        self.due.append(reduction)
        if record is not None:
            self._recorded.append(reduction)
        self.counters.note(number, offset)
        self.counters.raise_to(POSTED, number + 1)
        self._add_what_is_posted()
        return reduction

    def _add_what_is_posted(self) -> None:
        """Add the slices of reductions that all ranks have announced, in order.

        All ranks are needed, not only contributors: a slower rank may still read the old `out` (the
        summed gradient by which it updates its parameters, if these are replicated).
        """
        while self.due and self.counters.all_reached(POSTED, self.due[0].number + 1):
            reduction = self.due.popleft()
            reduction.add()
            self.counters.raise_to(SUMMED, reduction.number + 1)

    def is_complete(self, number: int) -> bool:
        """Return whether all ranks have added their slices of a reduction."""
        return self.counters.all_reached(SUMMED, number + 1)

    def note_ends(self) -> None:
        """Record for the timeline which reductions are complete, since no message reports their end."""
        while self._recorded and self.is_complete(self._recorded[0].number):
            spans.end(self._recorded.popleft().record)

    def close(self) -> None:
        self._memory.close()
        self._inner.close()
