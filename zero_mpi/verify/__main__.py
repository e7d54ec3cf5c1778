"""`python -m zero_mpi.verify`."""

from zero_mpi.verify.command import main

main()
