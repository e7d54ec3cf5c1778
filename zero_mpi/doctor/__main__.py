"""`python -m zero_mpi.doctor`."""

from zero_mpi.launch.start import start

start("doctor")
