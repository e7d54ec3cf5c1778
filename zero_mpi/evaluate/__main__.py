"""`python -m zero_mpi.evaluate`."""

from zero_mpi.evaluate import main

main()
