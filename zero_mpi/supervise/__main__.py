"""`python -m zero_mpi.supervise`."""

from zero_mpi.launch.start import start

start("supervise")
