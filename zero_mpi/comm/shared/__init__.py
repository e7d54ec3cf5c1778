"""Transport in the shared memory of a node: parameters are stored once, gradients summed in place (`comm`).

Free space is checked and pages are allocated in advance (`memory`), because Open MPI checks for space on only
one rank, and the other ranks would wait forever. Without enough space the run uses `mpi` and prints the
reason. Sizes come from `sharding.layout` before the model exists. The same bytes are exchanged as with `mpi`,
but they are read instead of sent.
"""
