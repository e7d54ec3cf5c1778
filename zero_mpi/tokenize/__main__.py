"""`python -m zero_mpi.tokenize`."""

from zero_mpi.tokenize import main

main()
