"""`python -m zero_mpi.hostfile`."""

from zero_mpi.hostfile import main

main()
