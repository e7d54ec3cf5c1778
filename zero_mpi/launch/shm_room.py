"""Room in /dev/shm for the MPI library's own segments, looked at before MPI starts.

MPICH dies of a segmentation fault, before it says a word, where /dev/shm is too small for the segment that
all ranks of a node share: containers give it 64 MiB unless they are told otherwise. Most of what it takes is
UCX's, for messages inside the node that MPICH carries by itself; so where room is short UCX is told to do
without. Ranks of a node decide alike: the segment that must have room is made after all have come here, and
where an earlier rank's UCX took its part, there was room for the parts of all.
"""

from __future__ import annotations

import os
import platform
import signal
import time
from collections.abc import MutableMapping
from pathlib import Path

from zero_mpi import environment
from zero_mpi.errors import UsageError
from zero_mpi.launch import leftovers
from zero_mpi.launch.ending import DRAIN, say
from zero_mpi.launch.limits import process_age

# Bytes of a rank, measured with 1 to 16 ranks of MPICH 5.0 on UCX 1.19: with UCX's segment and without.
WITH_UCX, WITHOUT_UCX = 5_400_000, 1_066_000
SPARE = 1 << 18  # bytes of a node beside that
UCX = {"UCX_TLS": "^posix"}
REMEDY = "give it more room (containers: --shm-size=1g or --ipc=host), or start fewer ranks a node"


def check(environ: MutableMapping[str, str] = os.environ) -> None:
    """Raise UsageError if MPI has no room to start; choose what takes less where room is short."""
    if "PMI_FD" not in environ:  # of MPICH and its kin; Open MPI takes 0.1 MB a rank
        return
    problem = find_problem(environ)
    if problem:
        if environment.local_ranks(environ) < int(environ.get("PMI_SIZE", "0")):
            end_all_nodes(problem, environ)
        raise UsageError(problem)


def find_problem(environ: MutableMapping[str, str]) -> str:
    """Return why MPI could not start, or an empty text; set in `environ` what takes less if room is short."""
    free, ranks = free_bytes(), environment.local_ranks(environ)
    if free is None or free >= ranks * WITH_UCX + SPARE:
        return ""
    for name, value in UCX.items():
        environ.setdefault(name, value)
    spares = all(environ[name] == value for name, value in UCX.items())
    needed = ranks * (WITHOUT_UCX if spares else WITH_UCX) + SPARE
    if free >= needed:
        return ""
    return (
        f"MPI needs {needed / 2**20:.1f} MiB of shared memory for {ranks} ranks on {platform.node()}, and "
        f"{leftovers.PLACE} has {free / 2**20:.1f} MiB free: {REMEDY}"
    )


def free_bytes(place: Path = leftovers.PLACE) -> int | None:
    """Return what this job can have in /dev/shm, what its ranks took so far included; None if unknown."""
    try:
        about = os.statvfs(place)
        files = [path.stat() for path in place.iterdir()]
    except OSError:  # no such folder; a segment that has just lost its name
        return None
    launched = time.time() - process_age(os.getppid())
    ours = (
        512 * each.st_blocks for each in files if each.st_uid == os.getuid() and each.st_mtime >= launched
    )
    return about.f_bavail * about.f_frsize + sum(ours)


def end_all_nodes(problem: str, environ: MutableMapping[str, str]) -> None:
    """Say the problem once for this node and end the job.

    Ranks of other nodes wait in MPI_Init, and MPICH's launcher lets them wait for a rank that exits before
    it has come there. It ends all ranks when one dies of a signal.
    """
    if environment.local_rank(environ):
        time.sleep(1.0)  # the first rank of the node speaks
    else:
        say(f"zero_mpi: error: {problem}")
        time.sleep(DRAIN)
    os.kill(os.getpid(), signal.SIGKILL)
