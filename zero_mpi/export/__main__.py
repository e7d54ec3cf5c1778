"""`python -m zero_mpi.export`."""

from zero_mpi.launch.stopping import start

start("export")
