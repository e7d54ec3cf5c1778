"""Exact transports of the host, by the value of --transport; tests of bits, bytes and timelines run on each.

`comm.kinds` lists the transports; all these tests fail if a transport has no class here.
"""

from zero_mpi import MPIComm
from zero_mpi.comm import kinds
from zero_mpi.comm.nodes.comm import NodesComm
from zero_mpi.comm.shared.comm import SharedComm

CLASSES = {kinds.MPI: MPIComm, kinds.SHARED: SharedComm, kinds.NODES: NodesComm}
OF_HOST = [kind for kind in kinds.TRANSPORTS if not kind.on_gpu and kind is not kinds.SERIAL]
ON_ONE_NODE = {kind.flag: CLASSES[kind] for kind in OF_HOST if kind is not kinds.NODES}
ON_SEVERAL = {kind.flag: CLASSES[kind] for kind in OF_HOST if kind.spans_nodes}
