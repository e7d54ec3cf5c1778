"""`python -m zero_mpi.verify`."""

from zero_mpi.launch.stopping import start

start("verify")
