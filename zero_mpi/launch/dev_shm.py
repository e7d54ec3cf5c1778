"""Segments of MPI libraries in /dev/shm: a check of free space, and removal of killed jobs' segments.

Free space is checked before MPI starts (`check_space`). MPICH crashes without a message if /dev/shm is too
small for the segment that all ranks of a node share; containers have 64 MiB by default. UCX uses most of that
segment for messages that MPICH can send without UCX, so if space is short, UCX is configured not to use it.
All ranks of a node get the same result, because MPI makes the segment after all ranks have checked.

A segment is a file, and it keeps its memory when a job is killed. So a rank removes the file's name as soon
as all ranks have mapped it (`unname`), and a run first removes stale segments (`sweep`), which no process has
open or mapped. To find these, it asks for a lease, which the kernel grants only if no other process has the
file open. A file's name does not identify its job, and a list of processes lacks those of other containers.
"""

import contextlib
import fcntl
import os
import platform
import re
import signal
import time
from collections.abc import MutableMapping
from pathlib import Path

from zero_mpi import environment
from zero_mpi.environment.limits import process_age
from zero_mpi.errors import UsageError
from zero_mpi.launch.ending import DRAIN, say

PLACE = Path("/dev/shm")
SEGMENTS: tuple[str, ...] = ("mpich_shm_*", "mpich_shar_tmp*", "ucx_shm_posix_*")  # MPICH, MPICH windows, UCX
SEGMENTS += ("vader_segment.*", "sm_segment.*", "osc_sm.*")  # Open MPI 4 and 5, windows of Open MPI
SETTLED = 2.0  # seconds after which a library has mapped a new segment
# Bytes per rank, measured with 1 to 16 ranks of MPICH 5.0 on UCX 1.19: with UCX's segment and without.
WITH_UCX, WITHOUT_UCX = 5_400_000, 1_066_000
SPARE = 1 << 18  # further bytes per node
# Intel MPI takes more memory while it sends, and dies of SIGBUS if there is none: 20 MiB for 2 or 8 ranks.
INTEL, OF_INTEL = 24 << 20, "I_MPI_HYDRA_UUID"  # bytes per node, and a variable that its launcher sets
REMEDY = "enlarge it (containers: --shm-size=1g or --ipc=host), or start fewer ranks per node"


def check_space(environ: MutableMapping[str, str] = os.environ) -> None:
    """Raise UsageError, or end a job of several nodes, if MPI lacks space; if space is short, limit UCX."""
    # MPICH and libraries based on it set PMI_FD; Open MPI needs only 0.1 MB per rank
    problem = find_problem(environ) if "PMI_FD" in environ else ""
    if problem and environment.local_ranks(environ) < int(environ.get("PMI_SIZE", "0")):
        # Ranks of other nodes wait in MPI_Init. If a rank exits before MPI_Init, MPICH's launcher leaves
        # them waiting; if a rank dies of a signal, the launcher ends all.
        if environment.local_rank(environ):
            time.sleep(1.0)  # the first rank of the node prints the error
        else:
            say(f"zero_mpi: error: {problem}")
            time.sleep(DRAIN)
        os.kill(os.getpid(), signal.SIGKILL)
    if problem:
        raise UsageError(problem)


def find_problem(environ: MutableMapping[str, str]) -> str:
    """Return why MPI cannot start, or an empty text; if space is short, set `environ` to limit UCX."""
    free, ranks = free_bytes(), environment.local_ranks(environ)
    need = ranks * WITH_UCX + SPARE
    if free is not None and free < need and environ.setdefault("UCX_TLS", "^posix") == "^posix":
        need = ranks * WITHOUT_UCX + SPARE
    if OF_INTEL in environ and ranks > 1:
        need = max(need, INTEL)
    if free is None or free >= need:
        return ""
    return (
        f"MPI needs {need / 2**20:.1f} MiB of shared memory for {ranks} ranks on {platform.node()}, but "
        f"{PLACE} has only {free / 2**20:.1f} MiB free: {REMEDY}"
    )


def free_bytes() -> int | None:
    """Return the free bytes in /dev/shm plus the bytes that this job's ranks already use; None if unknown."""
    try:
        stat = os.statvfs(PLACE)
        files = [path.stat() for path in PLACE.iterdir()]
    except OSError:  # the folder is missing, or a segment was just removed
        return None
    start = time.time() - process_age(os.getppid())
    segments = [file for file in files if file.st_uid == os.getuid() and file.st_mtime >= start]
    return stat.f_bavail * stat.f_frsize + sum(512 * file.st_blocks for file in segments)


def sweep(place: Path = PLACE) -> None:
    """Remove the segments of this user that are older than SETTLED and that no process has open or mapped."""
    for path in (path for pattern in SEGMENTS for path in place.glob(pattern)):
        with contextlib.suppress(OSError):
            stat = path.lstat()
            is_ours = stat.st_uid == os.geteuid() and time.time() - stat.st_mtime > SETTLED
            if is_ours and is_unused(path):
                path.unlink()


def is_unused(path: Path) -> bool:
    """Return True if no process has the file open, according to the kernel; False if unknown.

    The lease lasts a moment. If another process opens the file meanwhile, that process waits, and this
    process gets a signal without effect.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    with (
        contextlib.suppress(OSError),
        open(path, "rb", 0, opener=lambda name, _: os.open(name, flags)) as file,
    ):
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # the default, SIGIO, would end this process
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return True
    return False


def unname() -> None:
    """Remove the names of this job's own segments, once all ranks of the node have mapped the segments."""
    maps = Path("/proc/self/maps").read_text(errors="replace")
    for path in set(re.findall(rf"{PLACE}/mpich_shm_\w+$", maps, re.MULTILINE)):  # MPICH does not reopen them
        with contextlib.suppress(OSError):  # another rank removed it first
            os.unlink(path)
