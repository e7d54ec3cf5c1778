"""`python -m zero_mpi.train`."""

from zero_mpi.train.command import main

main()
