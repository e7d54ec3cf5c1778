"""`zero-mpi hostfile FILE --for mpich|openmpi`: a hostfile in the form that a launcher reads.

`command` reads and writes the forms, also for other commands.
"""
