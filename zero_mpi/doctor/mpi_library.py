"""The MPI library at work: its threads, the launcher, whether both belong together, settings that harm.

A launcher of another MPI starts as many jobs of one rank as there were to be ranks. Each takes itself for the
whole job, so nothing else here would notice it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from zero_mpi.cli.text import plural
from zero_mpi.doctor.ranks import Ranks
from zero_mpi.doctor.verdicts import BAD, NOTE, Row, assessed
from zero_mpi.launch.consistency import split_into

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


def started(size: int, environ: Mapping[str, str] = os.environ) -> Row:
    """The row of the launcher."""
    launcher = next((name for variable, name in LAUNCHERS.items() if variable in environ), "")
    if alone := split_into(size, environ):
        value = f"{launcher} started {alone} processes, and each is a job of one rank"
        return Row("launcher", value, BAD, SAME_MPI)
    return Row("launcher", f"{launcher or 'none'}, {plural(size, 'rank')}")


def threads(where: Ranks) -> Row:
    """The row of what the library allows threads to do."""
    mpi = where.world.mpi
    if mpi is None:
        remedy = "pip install 'zero-mpi[mpich]', or mpi4py built on the MPI of your site"
        return Row("MPI threads", "no MPI library can be loaded: one process only", NOTE, remedy)
    levels = {getattr(mpi, f"THREAD_{name}"): name for name in ("SINGLE", "FUNNELED", "SERIALIZED")}
    level = levels.get(mpi.Query_thread(), "MULTIPLE").lower()
    if level == "multiple":
        return Row("MPI threads", level)
    less = "transfers go on only between layers, and only one thread may call the library"
    return Row("MPI threads", f"{level}: {less}", NOTE, "take an MPI that was built with MPI_THREAD_MULTIPLE")


def progress(found: list[Mapping[str, str]]) -> Row:
    """The row of a setting that makes blocking calls twenty times slower; environments of all ranks."""
    name = next((name for name in ASYNC_PROGRESS for environ in found if set_in(environ, name)), "")
    value = f"{name} is set: blocking calls take many times longer" if name else "none of the library's own"
    return assessed("progress threads", value, not name, f"unset {name}")


def set_in(environ: Mapping[str, str], name: str) -> bool:
    """Whether a switch is on."""
    return environ.get(name, "").lower() not in OFF


def section(where: Ranks) -> list[Row]:
    """The library and the launcher. Collective."""
    mine = {name: os.environ[name] for name in ASYNC_PROGRESS if name in os.environ}
    return [started(where.size), threads(where), progress(where.gather(mine))]
