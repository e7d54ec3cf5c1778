"""Environment variables that must be set before numpy is imported and MPI starts; existing values are kept.

A rank computes with one thread unless the user sets another number, because many ranks with a thread per core
are ten times slower. Exact mode also needs a fixed number, because BLAS rounds differently with another
number of threads. If a node has more ranks than cores, a waiting MPI library must yield its core; spinning
would be 10 to 100 times slower. `portable` has the additional settings for `--bits portable`.
"""

import contextlib
import os
import sys
from collections.abc import Mapping, MutableMapping

from zero_mpi.environment.limits import group_limits

THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
# Launchers' variables: the number of ranks on this node, and a rank's number on the node.
LOCAL_RANKS: tuple[str, ...] = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "PALS_LOCAL_SIZE")
LOCAL_RANKS += ("MV2_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
LOCAL_RANK: tuple[str, ...] = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK")
LOCAL_RANK += ("PALS_LOCAL_RANKID", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
LAUNCHER = ("PMI_RANK", "PMI_ID", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PALS_RANKID", "MV2_COMM_WORLD_RANK")
CORES_FLAGS = OPEN_MPI, MPICH, SRUN = (
    "mpirun --map-by slot:PE={n} (Open MPI)",
    "mpiexec -bind-to core:{n} (MPICH)",
    "srun --cpus-per-task {n}",
)
BINDING = {  # the first variable that is set decides; Slurm's are set in every allocation
    "OMPI_COMM_WORLD_RANK": OPEN_MPI,
    "I_MPI_HYDRA_UUID": "I_MPI_PIN_DOMAIN={n} (Intel MPI)",
    "HYDI_CONTROL_FD": MPICH,
    "SLURM_STEP_NUM_TASKS": SRUN,
    "PMI_RANK": MPICH,
}
YIELDING = {
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
    "MPIR_CVAR_ALLGATHERV_PIPELINE_MSG_SIZE": "67108864",  # pipelines switch ranks often
    "OMPI_MCA_mpi_yield_when_idle": "1",
}

as_started = dict(os.environ)  # the environment when this process started
threads_were_set = any(name in os.environ for name in THREADS)


def prepare(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that `environ` lacks. Do not set thread counts if numpy has read them already."""
    if not any(name in environ for name in THREADS) and "numpy" not in sys.modules:
        environ.update(dict.fromkeys(THREADS, "1"))
    if {"OMPI_COMM_WORLD_RANK", "PMIX_RANK"} & environ.keys():  # Open MPI's UCX warns if it finds no device
        environ.setdefault("OMPI_MCA_osc", "^ucx")
    if not under_launcher(environ) and os.path.exists(f"{sys.prefix}/bin/orted"):
        # the wheel of Open MPI 4.1 was built for another path; a launcher sets this variable for its ranks
        environ.setdefault("OPAL_PREFIX", sys.prefix)
    if local_ranks(environ) > node_cores(environ):
        for name, value in YIELDING.items():
            environ.setdefault(name, value)


def cores() -> int:
    return len(os.sched_getaffinity(0))


def quota() -> float | None:
    """Return the CPU quota of this process's control group in cores; None: no limit."""
    return group_limits()[2]


def within_quota(count: int) -> int:
    """Return `count`, or the number of full cores in the quota if that is less; at least 1."""
    limit = quota()
    return count if limit is None else max(1, min(count, int(limit)))


def crowded() -> list[str]:
    """Return the variables, as NAME=N, that request more threads than this process has cores."""
    counts = {name: os.environ.get(name, "") for name in THREADS}
    return [f"{name}={n}" for name, n in counts.items() if n.isdigit() and int(n) > cores()]


def node_cores(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of cores that all ranks of this node may use together, at most the CPU quota.

    A bound rank sees only its own cores; the launcher's process on the node, or Slurm, knows all cores.
    """
    allocated, count = environ.get("SLURM_CPUS_ON_NODE", ""), cores()
    if allocated.isdigit():
        count = max(count, int(allocated))
    elif under_launcher(environ):
        with contextlib.suppress(OSError):
            count = max(count, len(os.sched_getaffinity(os.getppid())))
    return within_quota(count)


def cores_per_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return the cores of each rank of this node: the cores that it is bound to, or an equal share."""
    return max(1, min(cores(), node_cores(environ) // local_ranks(environ)))


def local_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks on this node according to the launcher; 1 without a launcher."""
    return next((int(environ[name]) for name in LOCAL_RANKS if environ.get(name, "").isdigit()), 1)


def local_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return this process's rank within its node according to the launcher; None if it is not set."""
    return next((int(environ[name]) for name in LOCAL_RANK if environ.get(name, "").isdigit()), None)


def records_graphs() -> bool:
    return os.environ.get("ZERO_MPI_GPU_GRAPH") == "1"


def launch_rank() -> int:
    """Return this process's rank according to the launcher; 0 without a launcher."""
    return next((int(os.environ[name]) for name in LAUNCHER if os.environ.get(name, "").isdigit()), 0)


def under_launcher(environ: Mapping[str, str] = os.environ) -> bool:
    return any(name in environ for name in LAUNCHER)


def binding(count: int) -> str:
    """Return the launcher's flag that binds a rank to `count` cores; without a launcher, every such flag."""
    flags = next((BINDING[name] for name in BINDING if name in os.environ), "; ".join(CORES_FLAGS))
    return flags.replace("{n}", str(count))


def of_processor(field: str) -> str:
    """Return a field of the first processor in /proc/cpuinfo, such as "flags"; empty if there is none."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = file.read().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")
