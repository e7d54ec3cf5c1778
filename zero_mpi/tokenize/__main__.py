"""`python -m zero_mpi.tokenize`."""

from zero_mpi.launch.stopping import start

start("tokenize")
