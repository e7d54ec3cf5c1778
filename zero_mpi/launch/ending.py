"""End of a job: last messages, the end of all ranks, and a pause of the launcher while ranks save.

Several ranks may fail together, in any thread, even while another thread is inside the MPI library. So ranks
take turns to print, each message is a single write, and the rank that ends the job does not depend on the MPI
library alone.

When Open MPI's mpirun is ended (Ctrl-C, SIGTERM, a closed terminal), its process on each node sends SIGCONT,
SIGTERM and SIGKILL, 0.25 s apart, and no setting makes it wait (Open MPI 5.0, PRRTE 3.0). So a rank with
state to save pauses that process (SIGSTOP) as soon as SIGTERM arrives (`hold_launcher`), and continues it
after all have saved, or after a time limit; if the ranks are dead, a separate process continues it. If a rank
of the node has ended, SIGTERM comes for that reason, and ranks do not pause the process. A paused launcher
forwards no output, so ranks write directly to its destination. Other launchers pass signals on and wait.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from zero_mpi.files.foreign import printable

if TYPE_CHECKING:
    import subprocess

FAILED, BAD_USAGE, REQUEUE = 1, 2, 75
DRAIN = 0.2  # seconds for the launcher to forward messages, because an abort drops unread output
STAGGER = 0.3  # seconds per rank: if all fail together, the first ends the job before the others print
MOST_TURNS = 20  # ranks above this number print at the same time as the rank with this number
PATIENCE = 2.0  # seconds for the MPI library to end the job; another thread may hold its lock

LAUNCHERS = ("prterun", "prted", "mpirun", "mpiexec", "orterun", "orted")  # names of launcher processes
HOLD = 120.0  # longest pause in seconds; after it the launcher may end ranks that have not saved
POLL = 0.2  # seconds between checks of the ranks of the node
LATER = 5.0  # seconds after HOLD at which the separate process continues the launcher if no rank did

_is_over = threading.Event()  # set once the launcher must not be paused any more
_launchers: list[tuple[int, subprocess.Popen[bytes]]] = []  # (pid of a launcher, process that continues it)


def say(text: str) -> None:
    """Print lines to stderr in one write, so that lines of several ranks do not mix."""
    with contextlib.suppress(OSError):
        os.write(2, f"{printable(text, keep=chr(10))}\n".encode(errors="backslashreplace"))


def await_turn(rank: int, stagger: float = STAGGER) -> None:
    """Wait for this rank's turn; an earlier rank may print the same message and end the job."""
    time.sleep(stagger * min(rank, MOST_TURNS))


def end_surely(end: Callable[[int], object], status: int) -> NoReturn:
    """Call end(status), which ends the job; if a lock or a lost host blocks it, end only this process.

    An exit of this process alone is not enough: srun does not end the other ranks, and MPICH's mpiexec may
    return the signal with which it ended a rank instead of this status.
    """
    release_launcher()
    threading.Thread(target=end, args=(status,), daemon=True).start()
    time.sleep(PATIENCE)
    os._exit(status)


def hold_launcher() -> None:
    """Pause the launcher before it kills the ranks; all ranks of a node may call this."""
    pid = os.getppid()
    if "OMPI_COMM_WORLD_RANK" not in os.environ or _launchers or _is_over.is_set():
        return
    with contextlib.suppress(OSError):
        ranks = ranks_below(pid)
        is_complete = len(ranks) >= int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "0"))
        if not is_complete or Path(f"/proc/{pid}/comm").read_text().strip() not in LAUNCHERS:
            return
        import subprocess  # imported late, because signal handlers must be installed first

        os.kill(pid, signal.SIGSTOP)
        command, null = f"sleep {HOLD + LATER}; kill -CONT {pid}", subprocess.DEVNULL
        last_resort = subprocess.Popen(  # safe in a rank: Python uses vfork
            ["/bin/sh", "-c", command], stdin=null, stdout=null, stderr=null, start_new_session=True
        )
        _launchers.append((pid, last_resort))
        threading.Thread(target=_watch, args=(pid, ranks), daemon=True).start()
        for handle in (1, 2):
            descriptor = os.open(f"/proc/{pid}/fd/{handle}", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
            os.dup2(descriptor, handle)
            os.close(descriptor)


def _watch(pid: int, ranks: set[int]) -> None:
    deadline = time.monotonic() + HOLD
    while ranks <= ranks_below(pid) and time.monotonic() < deadline:
        if _is_over.wait(POLL):
            return
    release_launcher()


def ranks_below(pid: int) -> set[int]:
    """Return the process ids of the living ranks that a launcher has started on this node."""
    ranks = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            variables = (folder / "environ").read_bytes() if int(parent) == pid else b""  # empty if dead
            if b"\0OMPI_COMM_WORLD_RANK=" in b"\0" + variables:
                ranks.add(int(folder.name))
    return ranks


def release_launcher() -> None:
    """Continue the launcher if this process has paused it and it is alive; never pause it again."""
    _is_over.set()
    while _launchers:
        pid, last_resort = _launchers.pop()
        with contextlib.suppress(OSError):
            os.killpg(last_resort.pid, signal.SIGKILL)
        last_resort.wait()
        if pid == os.getppid():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)
