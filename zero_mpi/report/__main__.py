"""`python -m zero_mpi.report`."""

from zero_mpi.report import main

main()
