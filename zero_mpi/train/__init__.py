"""`python -m zero_mpi.train`: a run from its flags to its last checkpoint.

`command` reads the flags and starts all ranks, `setup` makes what they train with, `trainer` runs the steps.
"""


def main() -> None:
    """Entry point of the command."""
    from zero_mpi.train.command import main as run

    run()
