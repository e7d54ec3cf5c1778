"""`python -m zero_mpi.train`: trains a model, from the flags to the last checkpoint.

`command` reads the flags and starts the run, or describes it without starting it. `resolve` checks everything
that the flags name and returns a `RunSpec`, from which `setup` builds the transport, module and optimizer.
`steps` executes a step with an `objective`; `observers` act at each step. `trainer` runs all steps, and
`saving` writes checkpoints and decides on early stopping. `resume` finds the checkpoint to resume from.
`description` has the facts that a run's bits depend on, which must be equal on all ranks.

`summary` prints the report at the start of a run and measures the machine's peak. `text_model` generates text
in one process, and `timeline` merges the recordings of all ranks into one file.
"""
