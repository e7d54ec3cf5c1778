"""`python -m zero_mpi.evaluate`."""

from zero_mpi.launch.start import start

start("evaluate")
