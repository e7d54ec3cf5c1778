"""Transports for sharding within each node and replication between nodes (HYBRID_SHARD)."""

from zero_mpi.comm.base import Comm, Handle, ReduceScatter
from zero_mpi.comm.kinds import MPI, NODES
from zero_mpi.comm.mpi import MPIComm as Messages
from zero_mpi.comm.nodes.sums import NodeSums
from zero_mpi.comm.shared.comm import SharingWrapper
from zero_mpi.comm.topology import find_topology, node_communicator
from zero_mpi.errors import UsageError


class ShardGroup(SharingWrapper):
    """Transport of a node's ranks. A reduction needs `contributors`, which counts ranks of the whole job.

    Its `close` does not free the memory and the communicators of `sums`; their creator frees them.
    """

    def __init__(self, flat: Messages, sums: NodeSums) -> None:
        super().__init__(Messages(sums.node, threaded=False), sums.topology.ranks_per_node, sums.memory)
        self.meter = self._inner.meter = flat.meter
        self.kind = MPI if sums.memory is None else NODES
        self.exact = True  # also with --reduction fast
        self._flat, self.sums = flat, sums

    def progress(self) -> None:
        self._flat.progress()
        self._inner.progress()

    def _reduce(self, call: ReduceScatter) -> Handle:
        return self.sums.start(self, call, replicated=True)


class MPIComm(Messages):
    """`comm.mpi.MPIComm` for scripts and runs, with a `shard_group` that uses messages inside nodes too."""

    _owners: Comm | None = None

    def shard_group(self) -> Comm:
        """Return a transport of this node's ranks, or this transport if there is one node. Collective.

        Raise UsageError unless the nodes have equally many, consecutive ranks.
        """
        if self._owners is None:
            node = node_communicator(self._control)
            topology = find_topology(self._control, node)
            if topology.problem:
                node.Free()
                if topology.nodes > 1:
                    raise UsageError(f"--strategy hybrid-shard: {topology.problem}; use full-shard")
                self._owners = self
            else:
                lane = self._control.Split(topology.local, topology.node)
                self._owners = ShardGroup(self, NodeSums(self, topology, lane, node, None))
        return self._owners

    def close(self) -> None:
        if isinstance(self._owners, ShardGroup):
            self._owners.close()
            self._owners.sums.lane.Free()
            self._owners.sums.node.Free()
        super().close()
