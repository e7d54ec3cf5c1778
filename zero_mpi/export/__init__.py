"""`python -m zero_mpi.export`: a model in another type or format."""


def main() -> None:
    """Entry point of the command."""
    from zero_mpi.export.command import main as run

    run()
