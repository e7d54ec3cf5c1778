"""`python -m zero_mpi.train`: a run from its flags to its last checkpoint.

`command` reads the flags and starts all ranks, `session` makes of them what is trained with, `trainer` runs
the steps, and `saving` writes the checkpoints. What a run says at its end is in `sample`; `dry_run` says what
a run would be, without it.
"""
