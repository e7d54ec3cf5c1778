"""`python -m zero_mpi.train`."""

from zero_mpi.launch.stopping import start

start("train", "zero_mpi.train.command")
