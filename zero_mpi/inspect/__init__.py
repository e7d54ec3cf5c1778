"""`python -m zero_mpi.inspect`: what a model file or checkpoint holds, if it is sound, and what differs."""


def main() -> None:
    """Entry point of the command."""
    from zero_mpi.inspect.command import main as run

    run()
