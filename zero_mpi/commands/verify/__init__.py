"""`zero-mpi verify RUN`: checks the records of a run folder by recomputing its steps.

`history` checks the files against the hash chain and finds the steps that can be recomputed; `command`
recomputes them. A difference raises `Differs` on all ranks. No file in the folder is written or trusted.
"""
