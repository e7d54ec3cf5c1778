"""Open MPI's launcher kills its ranks a quarter of a second after it has told them to end: too soon to save.

Whatever ends mpirun (Ctrl-C, SIGTERM, a closed terminal), its process on each node sends SIGCONT, SIGTERM and
SIGKILL, 0.25 s apart, and no setting makes it wait (Open MPI 5.0, PRRTE 3.0). So a rank that has something to
save stops that process as soon as the SIGTERM comes, and lets it go on when all have saved, or after a while;
a process of its own sees to that where the ranks are gone. Where a rank of the node has ended the SIGTERM is
Open MPI's answer to that, and there is nothing to wait for. An interactive shell calls its job stopped
meanwhile. Other launchers hand signals on and wait.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

LAUNCHERS = ("prterun", "prted", "mpirun", "mpiexec", "orterun", "orted")  # the parents of ranks
LIMIT = 120.0  # seconds at most: if the ranks cannot save, the launcher shall do its work
EVERY = 0.2  # seconds between two looks at the ranks of the node
LATER = 5.0  # seconds after which another process lets it go on, if no rank is left to do it

_is_over = threading.Event()  # nothing is left that is worth a wait
_held: list[tuple[int, subprocess.Popen[bytes]]] = []  # the launcher's process, and who lets it go on


def launcher() -> int:
    """The process of Open MPI's launcher that has started this one, or 0."""
    parent = os.getppid()
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        return 0
    try:
        name = Path(f"/proc/{parent}/comm").read_text().strip()
    except OSError:
        return 0
    return parent if name in LAUNCHERS else 0


def hold() -> None:
    """Stop the launcher before it kills; the ranks of a node may all do so."""
    pid = launcher()
    if not pid or _held or _is_over.is_set():
        return
    ranks = ranks_below(pid)
    if len(ranks) < int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "0")):
        return
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGSTOP)
        _held.append((pid, sure_release(pid)))
        for handle in (1, 2):
            speak_past(pid, handle)
        threading.Thread(target=watch, args=(pid, ranks), daemon=True).start()


def watch(pid: int, ranks: list[int]) -> None:
    """Let the launcher go on when one of its ranks has ended, or after a while."""
    deadline = time.monotonic() + LIMIT
    while all(lives_below(pid, rank) for rank in ranks) and time.monotonic() < deadline:
        if _is_over.wait(EVERY):
            return
    release()


def ranks_below(pid: int) -> list[int]:
    """The ranks that a launcher has started on this node and that live."""
    processes = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    return [process for process in processes if lives_below(pid, process) and is_rank(process)]


def lives_below(pid: int, process: int) -> bool:
    """Whether a process lives that `pid` has started."""
    try:
        state, parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return False
    return int(parent) == pid and state not in "ZX"


def is_rank(process: int) -> bool:
    """Whether Open MPI has given a process a rank; its daemons on other nodes have none."""
    try:
        return b"\0OMPI_COMM_WORLD_RANK=" in b"\0" + Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return False


def sure_release(pid: int) -> subprocess.Popen[bytes]:
    """A process that outlives this one and lets the launcher go on; to start it is safe (vfork)."""
    command = f"sleep {LIMIT + LATER}; kill -CONT {pid}"
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        ["/bin/sh", "-c", command], stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
    )


def speak_past(pid: int, handle: int) -> None:
    """Write to where the launcher would: it passes nothing on any more, from now to its end."""
    with contextlib.suppress(OSError):
        theirs = os.open(f"/proc/{pid}/fd/{handle}", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
        os.dup2(theirs, handle)
        os.close(theirs)


def release() -> None:
    """Let it go on, if it was stopped here and still lives. What it then kills has ended or was given up.

    From now on it is not stopped any more.
    """
    _is_over.set()
    while _held:
        pid, waiting = _held.pop()
        with contextlib.suppress(OSError):
            os.killpg(waiting.pid, signal.SIGKILL)
        waiting.wait()
        if pid == os.getppid():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)
