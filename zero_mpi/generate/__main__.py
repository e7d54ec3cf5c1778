"""`python -m zero_mpi.generate`."""

from zero_mpi.generate import main

main()
