"""Messages of a rank before the job ends, and ending the job even if a lock or a lost host blocks it.

Several ranks may fail together, and in any thread, also while another thread is inside the MPI library. So
ranks take turns to print, a message is one write, and the rank that ends the job does not rely on the library
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
DRAIN = 0.2  # seconds for the launcher to pass on messages: at an abort it drops unread output
STAGGER = 0.3  # seconds per rank: if all fail at once, the first prints and ends the job before the others
MOST_TURNS = 20  # ranks that take turns; later ones print together with the last of these
PATIENCE = 2.0  # seconds for the MPI library to end the job; another thread may hold its lock


def say(text: str) -> None:
    """Print lines to stderr, in one write so that those of several ranks do not mix."""
    with contextlib.suppress(OSError):
        os.write(2, f"{printable(text, keep=chr(10))}\n".encode(errors="backslashreplace"))


def await_turn(rank: int, stagger: float = STAGGER) -> None:
    """Wait for the turn of a rank: earlier ranks may print the same message and end the job."""
    time.sleep(stagger * min(rank, MOST_TURNS))


def end_surely(end: Callable[[int], object], status: int) -> NoReturn:
    """End the job by end(status), or only this process if a lock or a lost host blocks that.

    An exit alone is not enough: srun does not end the other ranks, and MPICH's mpiexec may return the signal
    by which it ended one of them.
    """
    open_mpi_reprieve.release()
    threading.Thread(target=end, args=(status,), daemon=True).start()
    time.sleep(PATIENCE)
    os._exit(status)
