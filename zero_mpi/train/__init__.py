"""`python -m zero_mpi.train`: makes a run, from its flags to its last checkpoint.

`command` reads the flags and starts all ranks, or describes a run without starting it. `resolve` checks
everything that the flags name and returns a `RunSpec`; `setup` builds transport, module and optimizer from
it. `steps` makes the steps with an `objective`; `observers` act at each step. `trainer` runs all steps, and
`saving` writes checkpoints and handles early stopping. `resume` finds the checkpoint to resume from.
`description` has the facts that a run's bits depend on, and refuses ranks that differ in them.

`summary` prints the report at the start of a run and measures the machine's peak. `text_model` generates text
in one process, and `timeline` merges the recordings of all ranks into one file.
"""
