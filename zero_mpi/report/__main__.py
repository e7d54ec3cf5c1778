"""`python -m zero_mpi.report`."""

from zero_mpi.launch.stopping import start

start("report")
