"""A thread that pushes transfers on while layers compute, politely.

Neither MPICH nor Open MPI moves a nonblocking collective unless somebody calls into the library. Where
a core is free one thread tests what is in progress and sleeps between rounds; where ranks fill the cores
such a thread would only take time from the computation, and the runtime tests between layers instead.
"""

from __future__ import annotations

import threading
import time

from zero_mpi.comm.base import Handle

POLL_SECONDS = 2e-4  # seconds; a busier or an adaptive poll hid no more in measurements


class ProgressEngine:
    """The transfers in progress, pushed by a thread of its own or by calls of `push`."""

    def __init__(self, threaded: bool, poll: float = POLL_SECONDS) -> None:
        self._active: list[Handle] = []
        self._changed = threading.Condition()
        self._closed, self._poll = False, poll
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="zero_mpi progress", daemon=True)
            self._thread.start()

    def add(self, handle: Handle) -> None:
        """Look after `handle` until it is complete."""
        with self._changed:
            self._active.append(handle)
            self._changed.notify()

    def push(self) -> None:
        """Test everything in progress once, unless the thread does that."""
        if self._thread is None:
            self._test_all()

    def _test_all(self) -> None:
        with self._changed:
            active = list(self._active)
        finished = [handle for handle in active if handle.test()]
        if finished:
            with self._changed:
                self._active = [handle for handle in self._active if handle not in finished]

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._active or self._closed)
                if self._closed:
                    return
            self._test_all()
            time.sleep(self._poll)

    def close(self) -> None:
        """End the thread; what is in progress must have been waited for."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
