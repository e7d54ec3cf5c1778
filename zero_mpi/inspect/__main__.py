"""`python -m zero_mpi.inspect`."""

from zero_mpi.inspect.command import main

main()
