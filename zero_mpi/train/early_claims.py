"""What flags ask of a process before MPI starts: code that fixes its bits, and a GPU of its own."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence

from zero_mpi import device
from zero_mpi.config.command_line import parse
from zero_mpi.config.settings import Config
from zero_mpi.environment import portable
from zero_mpi.errors import UsageError


def obey_early(arguments: Sequence[str], read: Callable[[Sequence[str]], Config] = parse) -> None:
    """Pin bits and claim a GPU before MPI starts, as flags ask; wrong ones are told later, by one rank."""
    silent = io.StringIO()
    with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
        try:
            config = read(arguments)
        except (UsageError, SystemExit):
            return
    portable.claim(config.bits)
    device.claim(config.device)
