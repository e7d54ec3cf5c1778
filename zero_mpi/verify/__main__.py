"""`python -m zero_mpi.verify`."""

from zero_mpi.verify import main

main()
