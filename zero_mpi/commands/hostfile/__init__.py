"""`zero-mpi hostfile FILE --for mpich|openmpi`: a hostfile in the form that a launcher reads.

`host_entries` reads and writes the forms, also for other commands; `command` is the command.
"""
