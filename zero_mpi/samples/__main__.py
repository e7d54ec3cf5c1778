"""`python -m zero_mpi.samples`."""

from zero_mpi.launch.stopping import start

start("samples")
