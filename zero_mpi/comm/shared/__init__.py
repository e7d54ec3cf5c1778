"""Ranks of one node with shared memory: it holds parameters once (`comm`), and gradients are summed in place.

Free space is checked and pages are allocated in advance (`memory`), because Open MPI checks for space on only
one rank, and the other ranks would wait forever. Without space the run uses `mpi` and says why. Sizes come
from `sharding.layout` before the model exists. The transport moves the same bytes as `mpi`, but they are read
instead of sent.
"""
