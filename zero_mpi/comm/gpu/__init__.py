"""Transports for arrays on a GPU: `comm` plans exchanges of chunks and adds the chunks; a backend sends them.

The `backends` are a CUDA-aware MPI (`--transport mpi`, which reads device memory), `staged` (through pinned
host memory) and `nccl` (only on request). `select` chooses one: by default CUDA-aware MPI if the library
claims support, a test in a child process succeeds (`probe`) and a test between the ranks succeeds; otherwise
`staged`. In exact mode backends only move data. Our own kernel adds in rank order, so the results of every
backend are bit-identical to those of the host.

Only `GpuStreams` handles streams, events and the device of a thread. At most four transfers are in flight, in
start order, so buffers and pinned memory are allocated once. After a GPU fault no event completes; testing an
event raises the error, so the fault is not mistaken for a late rank.
"""
