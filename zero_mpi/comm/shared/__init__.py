"""Transport in the shared memory of a node (`comm`), with windows of memory and counters (`memory`).

Without enough space the run uses `mpi` and prints the reason. Sizes come from `sharding.layout` before the
model exists.
"""
