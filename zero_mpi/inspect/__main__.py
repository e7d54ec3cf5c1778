"""`python -m zero_mpi.inspect`."""

from zero_mpi.inspect import main

main()
