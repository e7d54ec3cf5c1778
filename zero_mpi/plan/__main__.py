"""`python -m zero_mpi.plan`."""

from zero_mpi.launch.start import start

start("plan")
