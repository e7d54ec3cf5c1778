"""`python -m zero_mpi.samples`."""

from zero_mpi.samples.command import main

main()
