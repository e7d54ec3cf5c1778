"""Transports: the collectives that sharding needs, one interface, started and waited for separately.

`base` is the interface (`Comm`, `Handle`), `partition` says which slice of an array each rank owns. `serial`
is one process; `mpi` works everywhere; the packages `shared`, `nodes` and `gpu` are faster where they fit.
`guarded` wraps a transport and compares what ranks start; `agree` compares what ranks are about
to make. `meter` counts bytes and waits.

Exact reductions do not use the sums of the MPI library, whose order changes with the library and the number
of ranks. Each owner receives its slice from every rank, in chunks of 1 MiB with two in flight, and adds them
in rank order: ((out + rank 0) + rank 1) + ... in float32. `fast` shares all code but this: it calls
Reduce_scatter and Allreduce of the library in chunks of 4 MiB.

Neither MPICH nor Open MPI moves a nonblocking collective while nobody calls into the library. Where cores are
free, or with ranks on several hosts, a thread does so (`transfer`). Where the ranks fill all cores of
one node, the runtime tests between layers instead. A transfer of several steps is a generator that yields the
requests it needs next, so it goes on by whoever tests it.
"""

from zero_mpi.comm.base import DONE, AllOf, Comm, Handle
from zero_mpi.comm.partition import Chunk, Partition
from zero_mpi.comm.serial import SerialComm

__all__ = ["DONE", "AllOf", "Chunk", "Comm", "Handle", "Partition", "SerialComm"]
