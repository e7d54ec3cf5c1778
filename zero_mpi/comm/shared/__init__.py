"""Ranks of one node by shared memory: parameters lie there once (`comm`), sums are made where gradients lie.

Free space is checked and pages are brought in beforehand (`memory`), because Open MPI looks for space on one
rank only and the others would wait forever. Without space the run uses `mpi` and says why. The sizes come
from `sharding.layout` before the model is there. The bytes that travel are those of `mpi`, read instead of
sent.
"""
