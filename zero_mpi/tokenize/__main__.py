"""`python -m zero_mpi.tokenize`."""

from zero_mpi.tokenize.command import main

main()
