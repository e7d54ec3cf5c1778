"""`python -m zero_mpi.generate`."""

from zero_mpi.generate.command import main

main()
