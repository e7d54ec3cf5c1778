"""The exact transports of the host by their names: tests of bits, bytes and time lines run on each."""

from zero_mpi import MPIComm
from zero_mpi.comm.nodes.comm import NodesComm
from zero_mpi.comm.shared.comm import SharedComm

ON_ONE_NODE = {"mpi": MPIComm, "shared": SharedComm}
ON_SEVERAL = {"mpi": MPIComm, "shared": NodesComm}
