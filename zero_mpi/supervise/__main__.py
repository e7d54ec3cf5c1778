"""`python -m zero_mpi.supervise`."""

from zero_mpi.launch.stopping import start

start("supervise")
