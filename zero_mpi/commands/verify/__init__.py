"""`zero-mpi verify RUN`: checks the claims of a run folder by computing its steps again.

`history` checks the files of the folder against the chain over them, and finds the segments of steps that can
be computed. `command` checks that settings and data are the run's, makes the steps by `train.steps`, as the
run did, and compares records and every tensor. A difference raises `Differs` on all ranks.

Nothing is written into the folder, and no file in it is trusted until it has been cross-checked.
"""
