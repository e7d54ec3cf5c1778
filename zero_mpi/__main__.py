"""`python -m zero_mpi COMMAND ...`, the same as the console script `zero-mpi`."""

from zero_mpi.commands.main import main

if __name__ == "__main__":
    main()
