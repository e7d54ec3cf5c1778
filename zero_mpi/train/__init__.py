"""`python -m zero_mpi.train`: a run from its flags to its last checkpoint.

`command` reads the flags and starts all ranks. `resolve` looks at all that flags name and answers with a
`RunSpec`; `setup` builds transport, module and optimizer of it, and `steps` makes the steps, which
`observers` see end. `trainer` runs them, and `saving` writes the checkpoints. `resume` finds the checkpoint
to go on from, `same_bits` refuses ranks that differ, and `description` has what decides a run's bits.

What a run says at its start is in `summary`, at its end in `sample`; `dry_run` says what a run would be,
without it. `mfu` measures the peak of the machine: matrix products that grow until one takes 2 ms, for 40 ms
on all ranks at once. `text_model` computes in one process, and `timeline` brings what ranks have recorded
into one file.
"""
