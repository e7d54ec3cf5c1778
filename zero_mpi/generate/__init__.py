"""`python -m zero_mpi.generate`: text from a GGUF model, in one process."""


def main() -> None:
    """Entry point of the command."""
    from zero_mpi.generate.command import main as run

    run()
