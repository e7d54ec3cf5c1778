"""`python -m zero_mpi.plan`."""

from zero_mpi.plan import main

main()
