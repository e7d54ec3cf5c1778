"""`zero-mpi verify RUN`: checks the claims of a run folder by computing its steps again.

`history` checks the files against the chain over them and finds the steps that can be computed; `command`
computes them. A difference raises `Differs` on all ranks. No file of the folder is written or trusted.
"""
