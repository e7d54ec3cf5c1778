"""What is installed, and whether it is the same on all ranks.

A rank that runs another version computes other bits, or speaks another format: a job refuses to start with
it. So it does where BLAS chose other kernels: then results would depend on who computes what.
"""

from __future__ import annotations

from zero_mpi.cli.text import few, ranks
from zero_mpi.doctor.verdicts import BAD, NOTE, Row
from zero_mpi.launch import consistency
from zero_mpi.launch.world import World
from zero_mpi.ops.code_cache import installed

OTHER = "mpi4py"  # may differ
SLOW = "numpy"  # the operations of an installation without numba


def look(world: World) -> dict[str, str]:
    """What this rank runs, by name: what a job compares before it starts, and mpi4py."""
    return consistency.installation(world) | {OTHER: installed(OTHER) or "none"}


def rows(found: list[dict[str, str]]) -> list[Row]:
    """A row for each name; ranks that differ from the first are named with what they have."""
    return [
        row(name, [versions.get(name, "none") for versions in found], NOTE if name == OTHER else BAD)
        for name in found[0]
    ]


def row(name: str, values: list[str], verdict: str) -> Row:
    """The row of one name; `verdict` where ranks differ."""
    others: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        others.setdefault(value, []).append(rank)
    first = values[0]
    del others[first]
    if others:
        text = ", ".join(few([f"{value} on {ranks(which)}" for value, which in others.items()]))
        remedy = "install the same on all hosts, and start all ranks from one environment"
        if name == "BLAS":
            remedy = "choose hosts of one kind, or give all ranks the same OPENBLAS_CORETYPE"
        return Row(name, f"{first}, but {text}", verdict, remedy)
    if name == "operations" and first == SLOW:
        remedy = "pip install 'zero-mpi[fast]', and leave ZERO_MPI_OPS and NUMBA_DISABLE_JIT unset"
        return Row(name, "plain NumPy, several times slower than compiled ones", NOTE, remedy)
    return Row(name, " ".join(first.split(", package")[0].split()))  # Open MPI tells more of itself
