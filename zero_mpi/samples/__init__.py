"""`python -m zero_mpi.samples`: what training would read of conversations, and what of it the loss counts."""


def main() -> None:
    """Entry point of the command."""
    from zero_mpi.samples.command import main as run

    run()
