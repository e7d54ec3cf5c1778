"""`python -m zero_mpi.inspect`."""

from zero_mpi.launch.stopping import start

start("inspect")
