"""`python -m zero_mpi.samples`."""

from zero_mpi.launch.start import start

start("samples")
