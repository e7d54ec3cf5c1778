"""`python -m zero_mpi.train`: a run from its flags to its last checkpoint.

`command` reads the flags and starts all ranks. `resolve` checks everything that the flags name and returns a
`RunSpec`; `setup` builds transport, module and optimizer from it, and `steps` makes the steps, which
`observers` follow. `trainer` runs them, and `saving` writes the checkpoints. `resume` finds the checkpoint
to resume from, `same_bits` refuses ranks that differ, and `description` holds what decides a run's bits.

`summary` prints what a run reports at its start, `sample` what it reports at its end; `dry_run` describes a
run without doing it. `mfu` measures the peak: matrix products that grow until one takes 2 ms, for 40 ms
on all ranks at once. `text_model` computes in one process, and `timeline` merges the recordings of all ranks
into one file.
"""
