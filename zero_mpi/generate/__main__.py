"""`python -m zero_mpi.generate`."""

from zero_mpi.launch.start import start

start("generate")
