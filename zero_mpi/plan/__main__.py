"""`python -m zero_mpi.plan`."""

from zero_mpi.plan.command import main

main()
