"""Ranks of one node by shared memory: parameters lie there once (`comm`), sums are made where gradients lie.

Room is checked and pages are brought in beforehand (`memory`), because Open MPI looks for room on one rank
only and the others would wait forever. Without room the run goes on over `mpi` and says why. The sizes come
from `sharding.layout` before the model is there. The bytes that travel are those of `mpi`, read instead of
sent.
"""
