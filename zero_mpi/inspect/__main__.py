"""`python -m zero_mpi.inspect`."""

from zero_mpi.launch.start import start

start("inspect")
