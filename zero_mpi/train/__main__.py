"""`python -m zero_mpi.train`."""

from zero_mpi.launch.start import start

start("train")
