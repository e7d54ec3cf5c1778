"""`python -m zero_mpi.evaluate`."""

from zero_mpi.launch.stopping import start

start("evaluate")
