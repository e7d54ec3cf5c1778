"""Ranks of one node by shared memory: parameters lie there once, sums are made where gradients lie.

A unit's parameters lie once, in an MPI shared window. Each rank writes its slice and reads the rest through a
read-only view, so a gather is a wait until the owners have counted up. Gradients are written into shared
slots. An owner adds its slice in rank order once all ranks have announced theirs; a slot is free again once
all owners have added. No rank may still read when an update begins: the norm of the gradient is a collective
after the last use, and elsewhere ranks meet first.

Room is checked and pages are brought in beforehand (`memory`), because Open MPI looks for room on one rank
only and the others would wait forever. Without room the run goes on over `mpi` and says why. The sizes come
from `sharding.layout` before the model is there. The bytes that travel are those of `mpi`, read instead of
sent.
"""
