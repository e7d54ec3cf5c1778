"""How a rank speaks when the job is about to end, and how it ends the job whatever is in the way.

A rank may fail while others do so too, and in any thread, also while another one is inside the MPI library.
So ranks take turns to speak, what they say is one write, and who ends the job does not lean on the library
alone.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from zero_mpi.files.foreign import printable
from zero_mpi.launch import open_mpi_reprieve

FAILED, BAD_USAGE, REQUEUE = 1, 2, 75
DRAIN = 0.2  # seconds for the launcher to pass on what was said: at an abort it drops what it has not read
STAGGER = 0.3  # seconds a rank: if all fail at once, the first speaks and ends the job before the others do
MOST_TURNS = 20  # ranks that take turns; those after them speak with the last of these
PATIENCE = 2.0  # seconds for the MPI library to end the job; another thread may hold its lock


def say(text: str) -> None:
    """Print lines to stderr, in one write so that those of several ranks do not mix."""
    with contextlib.suppress(OSError):
        os.write(2, f"{printable(text, keep=chr(10))}\n".encode(errors="backslashreplace"))


def await_turn(rank: int, stagger: float = STAGGER) -> None:
    """Wait for the turn of a rank: those before it may say the same, and end the job."""
    time.sleep(stagger * min(rank, MOST_TURNS))


def end_surely(end: Callable[[int], object], status: int) -> NoReturn:
    """End the job by end(status), or this process alone where a lock or a lost host is in the way.

    An exit alone would not do: srun lets the other ranks be, and MPICH's mpiexec may return the signal by
    which it ended one of them.
    """
    open_mpi_reprieve.release()
    threading.Thread(target=end, args=(status,), daemon=True).start()
    time.sleep(PATIENCE)
    os._exit(status)
