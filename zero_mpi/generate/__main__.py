"""`python -m zero_mpi.generate`."""

from zero_mpi.launch.stopping import start

start("generate")
