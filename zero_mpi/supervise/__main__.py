"""`python -m zero_mpi.supervise`."""

from zero_mpi.supervise import main

main()
