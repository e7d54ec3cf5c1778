"""`zero-mpi verify RUN`: whether a run is what its folder says, by computing its steps again.

`request` reads the flags. `claim` holds the files of the folder to the chain over them, and finds the
`stretches` of steps that can be computed; `premises` looks whether settings and data are the run's.
`recompute` makes the steps by `train.steps`, as the run did, and compares records and, by `state_bits`,
every tensor. What is not so is a `Differs` (`findings`), raised on all ranks.

Nothing is written into the folder, and nothing of it is believed that was not held to something else.
"""
