"""`python -m zero_mpi.train`: a run from its flags to its last checkpoint.

`command` reads the flags and starts all ranks, `resolve` looks at all that they name and answers with a
`RunSpec`, `setup` builds what is trained with, `trainer` runs the steps.
What a run says is in `summary` at its start and in `sample` at its end; `dry_run` says it without a run.
`resume` finds the checkpoint to go on from, `same_flags` and `same_bits` refuse ranks that differ. `mfu`
measures the peak of the machine at the start: matrix products that grow until one takes 2 ms, for 40 ms on
all ranks at once.
"""
