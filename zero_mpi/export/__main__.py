"""`python -m zero_mpi.export`."""

from zero_mpi.export import main

main()
