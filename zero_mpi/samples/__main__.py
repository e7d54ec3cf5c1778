"""`python -m zero_mpi.samples`."""

from zero_mpi.samples import main

main()
