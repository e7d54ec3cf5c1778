"""`python -m zero_mpi.trace`."""

from zero_mpi.launch.start import start

start("trace")
