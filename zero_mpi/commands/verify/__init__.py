"""`zero-mpi verify RUN`: checks a run by recomputing its steps and comparing them with its records.

`history` checks the files against the hash chain and finds the steps that can be recomputed. `command`
recomputes them. A difference raises `Differs` on all ranks. No file in the folder is changed, or trusted.
"""
