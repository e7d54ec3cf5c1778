"""`python -m zero_mpi.tokenize`."""

from zero_mpi.launch.start import start

start("tokenize")
