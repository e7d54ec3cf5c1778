"""`python -m zero_mpi.trace`."""

from zero_mpi.trace.command import main

main()
