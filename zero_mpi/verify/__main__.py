"""`python -m zero_mpi.verify`."""

from zero_mpi.launch.start import start

start("verify")
