"""Room in /dev/shm for the MPI library's own segments, looked at before MPI starts.

MPICH dies of a segmentation fault, before it says a word, where /dev/shm is too small for the segment that
all ranks of a node share: containers give it 64 MiB unless they are told otherwise. Most of what it takes is
UCX's, for messages inside the node that MPICH carries by itself; so where room is short UCX is told to do
without. Ranks of a node decide alike: the segment that must have room is made after all have come here, and
where an earlier rank's UCX took its part, there was room for the parts of all.

This module is imported before MPI starts, and must stay light.
"""

from __future__ import annotations

import atexit
import os
import platform
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from zero_mpi import environment
from zero_mpi.errors import UsageError
from zero_mpi.launch import leftovers

# Bytes of a rank, measured with 1 to 16 ranks of MPICH 5.0 on UCX 1.19: with UCX's segment and without.
WITH_UCX, WITHOUT_UCX = 5_400_000, 1_066_000
SPARE = 1 << 18  # bytes of a node beside that
UCX = {"UCX_TLS": "^posix"}
REMEDY = "give it more room (containers: --shm-size=1g or --ipc=host), or start fewer ranks a node"
STAGGER = 1.0  # seconds: if the first node has no room either, rank 0 speaks for all and ends the job


def check(environ: MutableMapping[str, str] = os.environ) -> None:
    """Raise UsageError if MPI has no room to start; choose what takes less where room is short."""
    if "PMI_FD" not in environ:  # of MPICH and its kin; Open MPI takes 0.1 MB a rank
        return
    problem = find_problem(environ)
    if problem:
        leave_the_others(problem, environ)
        raise UsageError(problem)


def find_problem(environ: MutableMapping[str, str]) -> str:
    """Why MPI could not start, or an empty text; sets in `environ` what takes less where room is short."""
    free, ranks = free_bytes(), environment.local_ranks(environ)
    if free is None or free >= ranks * WITH_UCX + SPARE:
        return ""
    for name, value in UCX.items():
        environ.setdefault(name, value)
    spares = all(environ[name] == value for name, value in UCX.items())
    needed = ranks * (WITHOUT_UCX if spares else WITH_UCX) + SPARE
    if free >= needed:
        return ""
    left = leftovers.left_behind(leftovers.PLACE)
    others = f"; {len(left)} files there are of killed jobs (zero-mpi doctor names them)" if left else ""
    return (
        f"MPI needs {mebibytes(needed)} of shared memory for {ranks} ranks on {platform.node()}, and "
        f"{leftovers.PLACE} has {mebibytes(free)} free{others}: {REMEDY}"
    )


def free_bytes(place: Path = leftovers.PLACE) -> int | None:
    """What this job can have in /dev/shm, what its ranks took so far included; None if there is none."""
    try:
        about = os.statvfs(place)
        begun = launched()
        files = [path.stat() for path in place.iterdir()]
    except OSError:  # no such folder; a segment that has just lost its name
        return None
    ours = [each for each in files if each.st_uid == os.getuid() and each.st_mtime >= begun]
    return about.f_bavail * about.f_frsize + sum(512 * each.st_blocks for each in ours)


def launched() -> float:
    """When the launcher's process on this node was started, by the clock of files; now if nobody knows."""
    try:
        stat = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(stat[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        age = 0.0
    return time.time() - age


def mebibytes(nbytes: int) -> str:
    """A number of bytes as text, in MiB."""
    return f"{nbytes / 2**20:.1f} MiB"


def leave_the_others(problem: str, environ: Mapping[str, str]) -> None:
    """Have the job ended when this process ends: other ranks may have found room and wait in MPI.

    Rank 0 speaks; another one if the job is still there when rank 0 would have ended it, nodes in turn.
    """
    atexit.register(abort_job, environ)
    if environment.launch_rank(environ) != 0:
        time.sleep(2 * STAGGER if environment.local_rank(environ) else STAGGER)
        os.write(2, f"zero_mpi: error: {problem}\n".encode())


def abort_job(environ: Mapping[str, str]) -> None:
    """Ask the launcher to end all ranks with status 2 (PMI-1, which a library would speak once it is up)."""
    if "SLURM_STEP_ID" in environ:  # speaks PMI-2; srun ends a step of which ranks fail by itself
        return
    descriptor = int(environ["PMI_FD"])
    os.write(descriptor, b"cmd=init pmi_version=1 pmi_subversion=1\n")
    os.read(descriptor, 1024)
    os.write(descriptor, b"cmd=abort exitcode=2\n")
