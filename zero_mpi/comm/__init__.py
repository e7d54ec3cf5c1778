"""Transports: one interface for all collectives that sharding needs. Start and wait are separate calls.

`base` defines the interface (`Comm`, `Handle`), and `partition` says which slice of an array each rank owns.
`serial` is for one process, and `mpi` works everywhere. The packages `shared`, `nodes` and `gpu` are faster
where they can be used. `guarded` wraps a transport and compares the collectives that ranks start; `agree`
compares descriptions of objects that ranks are about to make. `meter` counts bytes and waits.

Exact reductions do not use the sums of the MPI library, because their order changes with the library and the
number of ranks. Each owner receives its slice from every rank, in chunks of 1 MiB with two in flight, and
adds the slices in rank order: ((out + rank 0) + rank 1) + ... in float32. `fast` reductions call the
library's Reduce_scatter and Allreduce instead, in chunks of 4 MiB.

MPICH and Open MPI do not advance a nonblocking collective while no thread calls the library. If cores are
free, or ranks are on several hosts, a thread calls the library (`transfer`). If the ranks fill all cores of
one node, a thread would only take time from them, so the runtime tests transfers between layers instead.
"""

from zero_mpi.comm.base import DONE, AllOf, Comm, Handle
from zero_mpi.comm.partition import Chunk, Partition
from zero_mpi.comm.serial import SerialComm

__all__ = ["DONE", "AllOf", "Chunk", "Comm", "Handle", "Partition", "SerialComm"]
