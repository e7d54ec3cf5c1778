"""Segments of MPI libraries in /dev/shm: what killed jobs left is found and removed, ours lose their names.

A library's segment is a file with a name, which a kill leaves behind with its pages until the node is started
anew. So a rank takes the name away as soon as all ranks hold the segment (`unname`), and a run begins by
removing what is left of jobs that were killed before they came so far (`sweep`). Whether a process still
holds a file is asked of the kernel, by a lease: it grants one only where nobody else has the file open or
mapped, whoever they are. A list of processes would miss those of other containers that share /dev/shm.

This module is imported before MPI starts, and must stay light.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PLACE, PROC = Path("/dev/shm"), Path("/proc")
SEGMENTS = (  # MPICH, its windows, UCX, Open MPI 4 and 5, its windows
    "mpich_shm_*",
    "mpich_shar_tmp*",
    "ucx_shm_posix_*",
    "vader_segment.*",
    "sm_segment.*",
    "osc_sm.*",
)
HELD_FROM_START = re.compile(r"mpich_shm_\w+")  # opened by name while MPI starts and never again
SETTLED = 10.0  # seconds after which a library has long mapped what it made


@dataclass(frozen=True)
class Left:
    """What killed jobs left: how many files, their bytes."""

    files: int = 0
    nbytes: int = 0

    def __add__(self, other: Left) -> Left:
        return Left(self.files + other.files, self.nbytes + other.nbytes)

    @property
    def text(self) -> str:
        """What was left, as text."""
        files = "1 file" if self.files == 1 else f"{self.files} files"
        return f"{files} ({self.nbytes / 2**20:.1f} MiB) of killed jobs in {PLACE}"


removed = Left()  # by this process at its start


def candidates(place: Path) -> Iterator[Path]:
    """Segments of this user that are no longer new."""
    for pattern in SEGMENTS:
        for path in sorted(place.glob(pattern)):
            with contextlib.suppress(OSError):
                about = path.lstat()
                if about.st_uid == os.geteuid() and time.time() - about.st_mtime > SETTLED:
                    yield path


def left_behind(place: Path) -> list[Path]:
    """Segments of this user that are no longer new and that no process has open or mapped."""
    return [path for path in candidates(place) if is_unused(path)]


def is_unused(path: Path) -> bool:
    """Whether the kernel says that nobody has the file; False where it does not say.

    While the lease is held, which is for a moment, an open of the file by others waits, and we get a signal
    that does nothing.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # in place of SIGIO, which ends a process
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def sweep(place: Path = PLACE) -> None:
    """Remove what is left behind, and note in `removed` what that was."""
    global removed
    for path in left_behind(place):
        with contextlib.suppress(OSError):
            nbytes = 512 * path.lstat().st_blocks
            path.unlink()
            removed += Left(1, nbytes)


def unname(place: Path = PLACE, maps: Path = PROC / "self" / "maps") -> None:
    """Take the names of this job's own segments away, once all ranks of the node have them mapped.

    The library's own removal at its end finds nothing then, which it does not mind.
    """
    with contextlib.suppress(OSError):
        lines = maps.read_text(errors="replace").splitlines()
        for path in {line[line.index(f"{place}/") :] for line in lines if f"{place}/" in line}:
            if HELD_FROM_START.fullmatch(Path(path).name):
                remove(path)


def remove(path: str) -> None:
    """Remove a name that another rank may have removed."""
    try:
        os.unlink(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EPERM, errno.EACCES):
            raise
