"""Flags that act before MPI starts, and the flags and variables that all ranks must share."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Sequence

from zero_mpi import device
from zero_mpi.comm.agree import NOTHING
from zero_mpi.config.command_line import parse
from zero_mpi.config.settings import FIELDS, Config, spelled
from zero_mpi.environment import portable
from zero_mpi.errors import UsageError
from zero_mpi.launch.consistency import check
from zero_mpi.launch.world import World

VARIABLES = ("ZERO_MPI_RANKS_PER_NODE",)  # others may differ, or show in what they change


def check_settings(world: World, config: Config) -> None:
    """The flags, and the variables that stand for flags. Collective; raises UsageError."""
    check(world.comm, settings(config), "start all ranks with the same flags and variables")


def settings(config: Config) -> dict[str, str]:
    """Every setting by its flag, and the variables by their names."""
    flags = {spelled(name): str(getattr(config, name)) for name in FIELDS}
    return flags | {name: os.environ.get(name, NOTHING) for name in VARIABLES}


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
