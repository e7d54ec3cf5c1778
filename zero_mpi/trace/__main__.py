"""`python -m zero_mpi.trace`."""

from zero_mpi.launch.stopping import start

start("trace")
