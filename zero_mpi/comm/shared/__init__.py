"""Transport in the shared memory of a node (`comm`), with windows of memory and counters (`memory`).

Without enough space the run uses `mpi` and prints the reason. `sharding.layout` computes the sizes before
the model exists.
"""
