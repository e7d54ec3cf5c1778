"""`python -m zero_mpi.trace`."""

from zero_mpi.trace import main

main()
