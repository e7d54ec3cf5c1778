"""Ends a job that has stopped getting anywhere, and says where each rank stands.

The main thread names what it does (`beat`); a thread looks at the clock. Past the limit it writes one line
and all stacks and ends the process, not through MPI, whose lock another thread may hold; the launcher then
ends the other ranks.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time

STATUS = 86  # of a job that was ended for standing still
LOOK = 0.5  # seconds between looks


class Watchdog:
    """Watches this process; `limit` in seconds, 0 for never."""

    def __init__(self, rank: int, limit: float) -> None:
        self.rank, self.limit = rank, limit
        self._what, self._since = "start", time.monotonic()
        if limit > 0:
            threading.Thread(target=self._watch, name="zero_mpi watchdog", daemon=True).start()

    def beat(self, what: str) -> None:
        """The main thread begins `what`."""
        self._what, self._since = what, time.monotonic()

    def _watch(self) -> None:
        while True:
            time.sleep(min(LOOK, self.limit / 4))
            waited = time.monotonic() - self._since
            if waited > self.limit:
                self._end(waited)

    def _end(self, waited: float) -> None:
        text = f"zero_mpi: rank {self.rank}: no progress for {waited:.0f} s in {self._what}; ending the job\n"
        os.write(2, text.encode())
        faulthandler.dump_traceback(file=2, all_threads=True)
        os._exit(STATUS)
