"""`python -m zero_mpi.export`."""

from zero_mpi.export.command import main

main()
