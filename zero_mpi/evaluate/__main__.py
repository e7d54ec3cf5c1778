"""`python -m zero_mpi.evaluate`."""

from zero_mpi.evaluate.command import main

main()
