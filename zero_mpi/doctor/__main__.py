"""`python -m zero_mpi.doctor`."""

from zero_mpi.doctor.command import main

main()
