"""`python -m zero_mpi.doctor`."""

from zero_mpi.launch.stopping import start

start("doctor")
