"""Transport for several nodes: each node stores gathered data once, and sums pass from node to node.

*Gathers.* Each rank's slice is private. To gather a unit, the ranks of a lane exchange their slices into a
buffer in each node's memory, so that a node receives every slice once. When all ranks of a node have done
that for their lanes, the buffer is complete. A buffer can be used again when all ranks of the node have
released it. All ranks take and return buffers in the same order, so counting the returned buffers is enough.

`sums` computes *reductions*. All other communication uses MPI.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zero_mpi.comm.base import Comm, Handle, ModuleMemory, ReduceScatter
from zero_mpi.comm.kinds import GATHERED, NODES, RELEASED
from zero_mpi.comm.mpi import MPIComm
from zero_mpi.comm.nodes.hybrid import ShardGroup
from zero_mpi.comm.nodes.sums import NodeSums
from zero_mpi.comm.partition import Partition
from zero_mpi.comm.shared.memory import NodeMemory, NodesApart
from zero_mpi.comm.start_mpi import MPI, mpi_type
from zero_mpi.comm.topology import find_topology, node_communicator
from zero_mpi.comm.transfer import Running
from zero_mpi.comm.wrapper import ProgressingWrapper
from zero_mpi.device.arrays import BufferPool, address
from zero_mpi.device.types import Array


@dataclass(frozen=True)
class Needs:
    """Arguments of the first call of `memory`."""

    full: Sequence[Partition] = ()
    buffers: Sequence[int] = ()
    gathers: Sequence[int] = ()


class NodesComm(ProgressingWrapper):
    """The ranks of an MPI communicator, by default COMM_WORLD, on several nodes of equal size.

    `needs(ranks per node)` returns the arguments of the first call of `memory` on this transport or its
    `shard_group`. Collective; raises NoSharedMemory on all ranks if there is not enough shared memory.
    """

    def __init__(
        self, comm: Any = None, *, needs: Callable[[int], Needs] | None = None, threaded: bool | None = None
    ) -> None:
        world = MPI.COMM_WORLD if comm is None else comm
        node = node_communicator(world)
        self.topology = find_topology(world, node)
        problem = self.topology.problem
        if not problem and self.topology.ranks_per_node == 1:
            problem = "each node has one rank"
        if problem:
            node.Free()
            raise NodesApart(problem)
        request = Needs() if needs is None else needs(self.topology.ranks_per_node)
        full = [*request.full, *self._gather_buffers(request.gathers)]
        self._memory = NodeMemory(node, full, request.buffers)
        self._flat = MPIComm(world, threaded=threaded)
        super().__init__(self._flat, self.topology.ranks_per_node)
        self.kind, self.exact = NODES, True  # also with --reduction fast
        self.replicates_by_node = True  # each node stores replicated state once and receives each sum once
        self._lane = world.Split(self.topology.local, self.topology.node)
        self._sums = NodeSums(self._flat, self.topology, self._lane, node, self._memory)
        self._owners: ShardGroup | None = None
        self._pools: weakref.WeakSet[GatherPool] = weakref.WeakSet()
        self._started = self._launched = self._gathered = 0  # numbers of gathers that reached each stage
        self._released = 0  # number of shared buffers that this rank has returned

    def _gather_buffers(self, gathers: Sequence[int]) -> list[Partition]:
        """Return partitions of the buffers for gathered units: each rank allocates the pages of its part."""
        return [Partition(length, self.topology.ranks_per_node, 1024) for length in gathers]

    def shard_group(self) -> Comm:
        if self._owners is None:
            self._owners = ShardGroup(self._flat, self._sums)
        return self._owners

    def memory(
        self, full: Sequence[Partition], buffers: Sequence[int], gathers: Sequence[int] = ()
    ) -> ModuleMemory:
        arrays, slots = self._memory.allot(self._gather_buffers(gathers), buffers)
        pool = GatherPool(arrays, self._release)
        self._pools.add(pool)
        return ModuleMemory([None] * len(full), slots, pool)

    def _release(self) -> int:
        self._released += 1
        self._memory.counters.raise_to(RELEASED, self._released)
        return self._released

    @property
    def shared_bytes(self) -> int:
        return self._memory.nbytes

    @property
    def about(self) -> str:
        return (
            f"shared inside {self.topology.nodes} nodes of {self.topology.ranks_per_node} ranks, mpi between "
            f"them, {self.shared_bytes / 2**20:.1f} MiB of each node's shared memory"
        )

    def allgather(self, shard: Array | None, full: Array, partition: Partition, label: str = "") -> Handle:
        place = address(full)
        pool = next((pool for pool in self._pools if place in pool.lent_after), None)
        if pool is None or shard is None:
            return super().allgather(shard, full, partition, label)
        self.meter.sent_bytes += shard.nbytes * (self.topology.nodes - 1)
        number, self._started = self._started, self._started + 1
        running = self._gather(number, pool.lent_after[place], shard, full, partition)
        return self.wrapped(self._flat.start(running, "allgather", label))

    def _gather(self, number: int, releases: int, shard: Array, full: Array, partition: Partition) -> Running:
        counters = self._memory.counters
        # Nonblocking collectives of a lane must start in the same order on all of its ranks.
        yield lambda: self._launched == number and counters.all_reached(RELEASED, releases)
        full[partition.part(self.rank)] = shard
        lane = [ranks[self.topology.local] for ranks in self.topology.members]
        counts = [partition.counts[rank] for rank in lane]
        offsets = [partition.bounds[rank] for rank in lane]
        request = self._lane.Iallgatherv(MPI.IN_PLACE, [full, counts, offsets, mpi_type(full)])
        self._launched += 1
        yield [request]
        yield lambda: self._gathered == number
        counters.raise_to(GATHERED, number + 1)
        self._gathered += 1  # last, because from now on another thread may run the next gather
        yield lambda: counters.all_reached(GATHERED, number + 1)

    def _reduce(self, call: ReduceScatter) -> Handle:
        if self._memory.find(call.full)[0] is None:
            return super()._reduce(call)
        return self._sums.start(self, call, replicated=False)

    def close(self) -> None:
        if self._owners is not None:
            self._owners.close()
        self._memory.close()
        self._lane.Free()
        self._inner.close()


class GatherPool(BufferPool):
    """Buffers that the ranks of a node share; all ranks take and return them in the same order.

    If no buffer is free, the pool adds private memory, into which this rank gathers alone. `released` counts
    a returned buffer and returns the count over all pools. `lent_after` maps a shared buffer's address to the
    number of buffers that all ranks must have returned before it may be written.
    """

    def __init__(self, arrays: Sequence[Array], released: Callable[[], int]) -> None:
        super().__init__()
        self._released = released
        self._free += arrays
        self.lent_after = dict.fromkeys(map(address, arrays), 0)

    def give(self, buffer: Array) -> None:
        """Return a buffer to the pool, and signal that to the other ranks."""
        super().give(buffer)
        if address(buffer) in self.lent_after:
            self.lent_after[address(buffer)] = self._released()
