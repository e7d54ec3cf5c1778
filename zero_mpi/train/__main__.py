"""`python -m zero_mpi.train`."""

from zero_mpi.train import main

main()
