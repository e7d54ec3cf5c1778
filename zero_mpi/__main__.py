"""`python -m zero_mpi COMMAND ...`: what the console script `zero-mpi` does."""

from zero_mpi.commands.main import main

if __name__ == "__main__":
    main()
