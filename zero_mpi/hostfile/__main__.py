"""`python -m zero_mpi.hostfile`."""

from zero_mpi.launch.start import start

start("hostfile")
