"""`python -m zero_mpi.plan`."""

from zero_mpi.launch.stopping import start

start("plan")
