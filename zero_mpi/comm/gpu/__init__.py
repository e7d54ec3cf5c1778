"""Transports for arrays on a GPU: `comm` works out exchanges and adds, a backend carries the chunks.

The `backends` are a CUDA-aware MPI (`--transport mpi`: it takes device memory), `staged` (through pinned
memory of the host) and `nccl` (only where the user asks for it). `select` takes one. It takes the first one
by itself only after the library says yes, a child process has tried it (`probe`) and the ranks
have tried it with each other; otherwise `staged`. In exact mode backends only move data. The sums are made by
our own kernel in rank order, so every backend gives the bits of the host.

A transfer starts when the computing stream has passed the mark made at its start. By then the
data to send are made, and nothing reads memory to be overwritten. At its end the computing stream waits for
the side stream, on the GPU and not on the host. Only `GpuStreams` handles streams, events and the device of a
thread. At most four transfers are in flight, in the order of their starts, so buffers and pinned memory are
made once. After a fault of the GPU no event is ever complete; a look at one raises the error, so the fault is
not taken for a late rank.
"""
