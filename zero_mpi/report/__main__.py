"""`python -m zero_mpi.report`."""

from zero_mpi.report.command import main

main()
