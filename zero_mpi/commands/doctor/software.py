"""Versions on all ranks, the launcher, and settings of the MPI library.

A launcher of another MPI starts N jobs of one rank instead of one job of N ranks; nothing else shows it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping

from zero_mpi.cli.text import few, plural, ranks
from zero_mpi.commands.doctor.ranks import Ranks
from zero_mpi.commands.doctor.verdicts import BAD, NOTE, Row, assessed
from zero_mpi.launch import consistency
from zero_mpi.launch.consistency import split_into
from zero_mpi.ops.code_cache import installed

LAUNCHERS = {  # the first variable that is set names it; inside an allocation Slurm's are always there
    "OMPI_COMM_WORLD_RANK": "mpirun of Open MPI",
    "PALS_RANKID": "mpiexec of PALS",
    "MV2_COMM_WORLD_RANK": "mpirun of MVAPICH2",
    "I_MPI_HYDRA_UUID": "mpiexec of Intel MPI",
    "HYDI_CONTROL_FD": "mpiexec of MPICH",
    "SLURM_STEP_NUM_TASKS": "srun",
    "PMI_RANK": "mpiexec of MPICH",
    "PMIX_RANK": "a launcher that speaks PMIx",
}
ASYNC_PROGRESS = ("MPIR_CVAR_ASYNC_PROGRESS", "MPICH_ASYNC_PROGRESS", "I_MPI_ASYNC_PROGRESS")
SAME_MPI = (
    "use the mpirun of the MPI that mpi4py has loaded (above); with srun, --mpi=pmi2 for MPICH and "
    "--mpi=pmix for Open MPI"
)
OFF = ("", "0", "no", "false", "off")
FAST = "pip install 'zero-mpi[fast]', and leave ZERO_MPI_OPS and NUMBA_DISABLE_JIT unset"


def versions(where: Ranks) -> list[Row]:
    """Compare what a job compares before it starts, and mpi4py, which may differ. Collective."""
    mine = consistency.installation(where.world) | {"mpi4py": installed("mpi4py") or "none"}
    found = where.gather(mine)
    return [version(name, [each.get(name, "none") for each in found]) for name in mine]


def version(name: str, values: list[str]) -> Row:
    """Return the row of one name, given the value on each rank."""
    first, others = values[0], dict[str, list[int]]()
    for rank, value in enumerate(values):
        if value != first:
            others.setdefault(value, []).append(rank)
    if others:
        text = ", ".join(few([f"{value} on {ranks(which)}" for value, which in others.items()]))
        remedy = "install the same on all hosts, and start all ranks from one environment"
        if name == "BLAS":
            remedy = "choose hosts of one kind, or give all ranks the same OPENBLAS_CORETYPE"
        return Row(name, f"{first}, but {text}", NOTE if name == "mpi4py" else BAD, remedy)
    if name == "operations" and first == "numpy":
        return Row(name, "plain NumPy, several times slower than compiled ones", NOTE, FAST)
    return Row(name, " ".join(first.split(", package")[0].split()))  # Open MPI tells more of itself


def mpi_library(where: Ranks) -> Iterator[Row]:
    """Check launcher, thread level and progress threads. Collective."""
    yield launcher(where.size)
    yield threads(where.world.mpi)
    yield progress(where.gather([name for name in ASYNC_PROGRESS if is_on(os.environ, name)]))


def launcher(size: int, environ: Mapping[str, str] = os.environ) -> Row:
    """Return the row of the launcher."""
    name = next((name for variable, name in LAUNCHERS.items() if variable in environ), "none")
    if alone := split_into(size, environ):
        value = f"{name} started {alone} processes, and each is a job of one rank"
        return Row("launcher", value, BAD, SAME_MPI)
    return Row("launcher", f"{name}, {plural(size, 'rank')}")


def threads(mpi: object) -> Row:
    """Return the row of the library's thread level; `mpi` is None without a library."""
    if mpi is None:
        remedy = "pip install 'zero-mpi[mpich]', or mpi4py built on the MPI of your site"
        return Row("MPI threads", "no MPI library can be loaded: one process only", NOTE, remedy)
    names = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    level = {getattr(mpi, f"THREAD_{name}"): name.lower() for name in names}[mpi.Query_thread()]  # type: ignore[attr-defined]
    if level == "multiple":
        return Row("MPI threads", level)
    value = f"{level}: transfers go on only between layers, and only one thread may call the library"
    return Row("MPI threads", value, NOTE, "take an MPI that was built with MPI_THREAD_MULTIPLE")


def progress(found: Iterable[Iterable[str]]) -> Row:
    """Return the row of a setting that makes blocking calls twenty times slower, given those on each rank."""
    name = next((name for names in found for name in names), "")
    value = f"{name} is set: blocking calls take many times longer" if name else "none of the library's own"
    return assessed("progress threads", value, not name, f"unset {name}")


def is_on(environ: Mapping[str, str], name: str) -> bool:
    """Tell whether a switch is set to something that means on."""
    return environ.get(name, "").lower() not in OFF
