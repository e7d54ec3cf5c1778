"""`python -m zero_mpi.export`."""

from zero_mpi.launch.start import start

start("export")
