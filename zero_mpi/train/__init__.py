"""`python -m zero_mpi.train`: a run from its flags to its last checkpoint.

`command` reads the flags and starts all ranks, or describes a run without starting it. `resolve` checks
everything that the flags name and returns a `RunSpec`; `setup` builds transport, module and optimizer from
it. `steps` makes the steps by an `objective`, and `observers` follow them. `trainer` runs them, and `saving`
writes the checkpoints and stops early. `resume` finds the checkpoint to resume from, and `description` holds
what decides a run's bits and refuses ranks that differ.

`summary` prints what a run reports at its start and measures the machine's peak. `text_model` computes in one
process, and `timeline` merges the recordings of all ranks into one file.
"""
