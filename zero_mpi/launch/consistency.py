"""Checks that all ranks have the same package, Python, MPI, NumPy, flags and model files.

Hosts may differ, for example in the environment or in the copy of a file. Such a job would hang, or its ranks
would train differently. Ranks therefore compare these facts; one short message suffices if all agree.
"""

import hashlib
import os
import platform
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from threadpoolctl import threadpool_info

from zero_mpi import __version__, device, environment, ops
from zero_mpi.comm.agree import REFUSALS, Facts, alike
from zero_mpi.comm.base import Comm
from zero_mpi.environment import portable
from zero_mpi.errors import UsageError
from zero_mpi.launch.ending import BAD_USAGE
from zero_mpi.launch.world import World

T = TypeVar("T")
SAME_FILES = "copy the same files to all hosts, or use a shared file system"
SAME_FLAGS = "start all ranks with the same flags and variables"
# Variables in which launchers give the number of ranks, and variables with the number of this rank.
RANK_COUNTS = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PALS_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
RANK_NUMBERS = (*environment.LAUNCHER, "SLURM_PROCID")


def check(comm: Comm, facts: Facts, remedy: str) -> None:
    """Raise UsageError on all ranks if facts differ, naming the first rank that differs. Collective."""
    same(comm, lambda: (None, facts), remedy)


def same(comm: Comm, prepare: Callable[[], tuple[T, Facts]], remedy: str) -> T:
    """Return the result of prepare(); raise if it fails on any rank or facts differ. Collective."""
    return alike(comm, prepare, REFUSALS, remedy=f"; {remedy}")


def check_installation(world: World) -> None:
    """Raise UsageError unless all ranks run the same software and belong to one job. Collective."""
    check_not_alone(world)
    remedy = "use the same environment on all hosts, and --bits portable if their CPUs differ"
    check(world.comm, installation(world), remedy)


def installation(world: World) -> dict[str, str]:
    """Return the versions of the software that this rank uses."""
    facts = {
        "zero_mpi": __version__,
        "zero_mpi's source": own_source(),
        "Python": platform.python_version(),
        "NumPy": np.__version__,
        "operations": ops.backend(),
        "BLAS": blas(),
    }
    if world.mpi is not None:
        facts["MPI"] = mpi_library(world)
    return facts


def blas() -> str:
    """Return NumPy's BLAS library and the kernels that it uses; different kernels round differently."""
    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    pool = min(pools, key=lambda pool: "numpy" not in pool["filepath"], default={"version": "unknown"})
    parts = (pool.get(key) for key in ("internal_api", "version", "architecture"))
    return " ".join(str(part) for part in parts if part)


def check_pins() -> None:
    """Raise UsageError unless this process computes as `--bits portable` requires."""
    device_fault = "it applies to CPUs only: use --device cpu" if device.in_use().name != "cpu" else ""
    fault = device_fault or portable.fault(blas(), ops.compiled_for())
    if fault:
        raise UsageError(f"--bits portable: {fault}")


@cache
def own_source() -> str:
    return source_digest(Path(environment.__file__).parents[1])


def source_digest(folder: Path) -> str:
    """Return a digest of all Python files of the package, since many commits have the same version."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(os.fsencode(path.relative_to(folder)) + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def short_digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def split_into(size: int, environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of started ranks if each is alone in its MPI world; otherwise 0."""
    count = max(int(environ[name]) if environ.get(name, "").isdigit() else 1 for name in RANK_COUNTS)
    return count if size == 1 < count else 0


def is_first(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if this is the launcher's first rank, or there is no launcher."""
    return all(environ.get(name, "0") == "0" for name in RANK_NUMBERS)


def check_not_alone(world: World, environ: Mapping[str, str] = os.environ) -> None:
    """Raise UsageError if a launcher has started several ranks and each is alone in its MPI world.

    In that case mpi4py has loaded no MPI library, or not the launcher's. Only the first rank prints.
    """
    count = split_into(world.size, environ)
    if not count:
        return
    if not is_first(environ):
        raise SystemExit(BAD_USAGE)
    library = "no MPI" if world.mpi is None else mpi_library(world)
    raise UsageError(
        f"the launcher started {count} ranks, but each of them is alone with {library}: use the mpiexec "
        "(with srun: the --mpi=...) of the MPI library that mpi4py loads"
    )


def mpi_library(world: World) -> str:
    return str(world.mpi.Get_library_version()).replace("\t", " ").partition("\n")[0]
