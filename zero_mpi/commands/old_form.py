"""Old form `python -m zero_mpi.NAME` of starting a command, known from version 0.1.0. It still works.

`python -m` asks the import finder in this file for that module, and then runs this file instead.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType

from zero_mpi.environment import launch_rank

MOVED = (
    "completion", "doctor", "evaluate", "export", "generate", "hostfile", "inspect", "report", "samples",
    "supervise", "tokenize", "trace", "verify",
)  # fmt: skip


class OldForms:
    """Import finder that returns this file for the old module names of commands."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, command = name.partition(".")
        is_old = package == "zero_mpi" and (command in MOVED or command == "plan.__main__")
        return spec_from_file_location(name, __file__) if is_old else None


def run(name: str) -> None:
    """Run a command that was started by its old form. Print the new form after it has succeeded."""
    from zero_mpi.commands.main import start

    try:
        start(name)
    except SystemExit as end:
        if end.code in (0, None) and launch_rank() <= 0:
            sys.stderr.write(f"note: python -m zero_mpi.{name} is now zero-mpi {name}\n")
        raise


if __name__ == "__main__":
    run(__spec__.name.split(".")[1])
