"""`python -m zero_mpi.hostfile`."""

from zero_mpi.launch.stopping import start

start("hostfile")
