"""`zero-mpi verify RUN`: whether a run is what its folder says, by computing its steps again.

`command` reads the flags. `history` holds the files of the folder to the chain over them, and finds the
segments of steps that can be computed. `compute` looks whether settings and data are the run's, makes the
steps by `train.steps`, as the run did, and compares records and every tensor. What is not so is a `Differs`,
raised on all ranks.

Nothing is written into the folder, and nothing of it is believed that was not held to something else.
"""
