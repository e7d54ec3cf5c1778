"""Checks whether ranks, or a job and the job whose checkpoint it resumes from, compute the same bits.

A trial of the operations decides (`ops.trial`); names explain. Names alone would say too much and too little:
processors of two names may compute alike, and one name of a BLAS kernel stands for several processors. The
number of threads counts by itself where the host computes, for a trial cannot cover all shapes.
"""

from __future__ import annotations

import contextlib
import io
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zero_mpi import __version__, device, environment, ops
from zero_mpi.cli.text import ranks as named
from zero_mpi.comm.agree import NOTHING, odd_one
from zero_mpi.config.command_line import parse
from zero_mpi.config.settings import FIELDS, Config, spelled
from zero_mpi.environment import portable
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.launch.consistency import blas, check
from zero_mpi.launch.world import World
from zero_mpi.ops import trial
from zero_mpi.telemetry import log

Machine = Mapping[str, Any]
TRIAL, THREADS = "trial", "threads"
EXPLAINING = ("BLAS", "code for", "processor")  # names that are compared only where the trial differs
REMEDY = (
    "use the same threads (--threads N) and CPU type (or --bits portable) on all ranks, or --reduction fast"
)


def machine(threads: int, kind: Any) -> dict[str, Any]:
    """Return what this rank computes with: names, and the digest of a trial with the threads that are set.

    kind: the dtype that the run computes in.
    """
    facts = {
        THREADS: threads,
        "operations": ", ".join(filter(None, (ops.backend(), ops.products(kind)[0]))),
        "numpy": np.__version__,
        "zero_mpi": __version__,
        "cpu": platform.machine(),
        "BLAS": blas(),
        "code for": ops.compiled_for() or "none",
        "processor": processor(),
    }
    if device.in_use().name != "cpu":
        facts["device"] = device.in_use().about
    return facts | {TRIAL: trial.digest(kind)}


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name as far as the system reports it."""
    return environment.of_processor("model name", cpuinfo) or platform.processor() or platform.machine()


# ------------------------------------------------------------------------------------------- between ranks


def check_bits(found: Sequence[tuple[str, Machine]], exact: bool, notes: list[str]) -> None:
    """Raise UsageError for a rank that computes other bits, naming what it has that most ranks do not have.

    If not `exact`, add a note instead. `found`: host and machine of each rank.
    """
    # A GPU's bits do not depend on the threads of its host.
    values = [f"{each[TRIAL]} {'' if 'device' in each else each[THREADS]}" for _, each in found]
    odd = odd_one(values)
    if odd is None:
        return
    rank, usual = odd
    alike = [number for number, value in enumerate(values) if value == usual]
    hosts, machines = zip(*found, strict=True)
    here, there = names(machines[rank], machines[alike[0]])
    text = (
        f"the ranks compute different bits: rank {rank} on {hosts[rank]} has {here}, "
        f"{named(alike)} (on {hosts[alike[0]]}) {there}"
    )
    if exact:
        raise UsageError(f"{text}; {REMEDY}")
    notes.append(log.Caution(text))


def names(mine: Machine, usual: Machine) -> tuple[str, str]:
    """Return texts for two machines: the names that differ, or else the trial itself."""
    keys = [key for key in mine if key != TRIAL and mine[key] != usual.get(key)] or [TRIAL]
    here, there = (", ".join(f"{key} {shown(of.get(key))}" for key in keys) for of in (mine, usual))
    return here, there


# ------------------------------------------------------------------------------------------- at a resume


def changes(before: Machine, now: Machine, what: str = "the checkpoint") -> Iterator[str]:
    """Yield at most one line on differences from a checkpoint's machine that may change the last bits."""
    other = before.get(TRIAL) != now.get(TRIAL)
    keys = [
        key
        for key in dict.fromkeys((*now, *before))
        if key != TRIAL and before.get(key) != now.get(key) and (other or key not in EXPLAINING)
    ]
    made = "; ".join(f"{key} {shown(before.get(key))}, now {shown(now.get(key))}" for key in keys)
    if other and TRIAL not in before:
        made = "; ".join(filter(None, (made, "no record of a kernel test, so its bits are unknown")))
    elif other and not keys:
        made = "kernels that gave other bits in a test, although CPU and libraries have the same names"
    if made:
        yield f"{what} was made with {made}: the last bits of results may change"


VARIABLES = ("ZERO_MPI_RANKS_PER_NODE",)  # other variables may differ, or show in their effects


def check_settings(world: World, config: Config) -> None:
    """Check the flags, and the variables that stand for flags. Collective; raises UsageError."""
    check(world.comm, settings(config), "start all ranks with the same flags and variables")


def settings(config: Config) -> dict[str, str]:
    """Return every setting by its flag, and the variables by their names."""
    flags = {spelled(name): str(getattr(config, name)) for name in FIELDS}
    return flags | {name: os.environ.get(name, NOTHING) for name in VARIABLES}


def obey_early(arguments: Sequence[str], read: Callable[[Sequence[str]], Config] = parse) -> None:
    """Pin bits and claim a GPU before MPI starts, as flags ask; one rank reports wrong flags later."""
    silent = io.StringIO()
    with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
        try:
            config = read(arguments)
        except (UsageError, SystemExit):
            return
    portable.claim(config.bits)
    device.claim(config.device)
