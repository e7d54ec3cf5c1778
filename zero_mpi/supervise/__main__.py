"""`python -m zero_mpi.supervise`."""

from zero_mpi.supervise.command import main

main()
