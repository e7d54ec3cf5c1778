"""`python -m zero_mpi.report`."""

from zero_mpi.launch.start import start

start("report")
