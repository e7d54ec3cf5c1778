"""Segments of MPI libraries in /dev/shm: what killed jobs left is removed, ours lose their names.

A library's segment is a file with a name, which a kill leaves behind with its pages. So a rank removes the
name as soon as all ranks hold the segment (`unname`), and a run begins by removing what jobs left that were
killed before they came so far (`sweep`). There is one rule: a segment that no process has open or mapped is
stale. The kernel knows that, and tells it by a lease, which it grants for a file that nobody else has. The
libraries choose the names, so these cannot say who made a file; and a list of processes would miss those of
other containers that share /dev/shm.

This module is imported before MPI starts, and must stay light.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import time
from pathlib import Path

PLACE = Path("/dev/shm")
SEGMENTS = (  # MPICH, its windows, UCX, Open MPI 4 and 5, its windows
    "mpich_shm_*",
    "mpich_shar_tmp*",
    "ucx_shm_posix_*",
    "vader_segment.*",
    "sm_segment.*",
    "osc_sm.*",
)
HELD_FROM_START = re.compile(r"mpich_shm_\w+")  # opened by name while MPI starts and never again
SETTLED = 2.0  # seconds after which a library has mapped what it made

removed: list[int] = []  # bytes of the files that this process has removed at its start


def left_behind(place: Path) -> list[Path]:
    """Return the segments of this user that are no longer new and that no process has open or mapped."""
    found = []
    for path in sorted(path for pattern in SEGMENTS for path in place.glob(pattern)):
        with contextlib.suppress(OSError):
            about = path.lstat()
            is_ours = about.st_uid == os.geteuid() and time.time() - about.st_mtime > SETTLED
            if is_ours and is_unused(path):
                found.append(path)
    return found


def is_unused(path: Path) -> bool:
    """Return True if the kernel says that nobody has the file; False also where it does not say.

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
    """Remove what is left behind, and note its bytes in `removed`."""
    for path in left_behind(place):
        with contextlib.suppress(OSError):
            nbytes = 512 * path.lstat().st_blocks
            path.unlink()
            removed.append(nbytes)


def unname() -> None:
    """Remove the names of this job's own segments, once all ranks of the node have them mapped.

    The library's own removal at its end finds nothing then, which it does not mind.
    """
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
        for path in {line[line.index(f"{PLACE}/") :] for line in lines if f"{PLACE}/" in line}:
            if HELD_FROM_START.fullmatch(Path(path).name):
                with contextlib.suppress(OSError):  # another rank was first
                    os.unlink(path)
