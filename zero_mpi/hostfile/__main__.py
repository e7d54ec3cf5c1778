"""`python -m zero_mpi.hostfile`."""

from zero_mpi.hostfile.command import main

main()
