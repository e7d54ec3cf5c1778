"""Transfers of several steps, as generators that any idle thread can advance.

A generator yields what it waits for: a list of MPI requests, or a function that tests a condition (such as a
counter in shared memory). So the progress thread (`ProgressEngine`), a call of `test` between layers, or the
caller's `wait` can advance a reduction of many chunks.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from zero_mpi.comm.base import Handle
from zero_mpi.comm.meter import Meter
from zero_mpi.comm.start_mpi import MPI
from zero_mpi.telemetry import spans

Needed = list[Any] | Callable[[], bool]  # MPI requests, or a function that returns whether a condition holds
Running = Iterator[Needed]
CHECK_SECONDS = 2e-5  # seconds between checks of a condition that is not a request
POLL_SECONDS = 2e-4  # seconds between rounds of the thread; shorter or adaptive intervals gained nothing


def has_come(needed: Needed) -> bool:
    return needed() if callable(needed) else bool(MPI.Request.Testall(needed))


@contextmanager
def loan(free: list[Any], make: Callable[[], Any]) -> Iterator[Any]:
    """Return a context that lends an object of `free`, or a new one, and then adds it to `free`."""
    try:  # another thread may run this at the same time
        loan = free.pop()
    except IndexError:
        loan = make()
    try:
        yield loan
    finally:
        free.append(loan)


class Transfer(Handle):
    """Handle that runs a generator of requests and conditions; `test` and `wait` advance it.

    The lock lets the progress thread and the owner advance the same transfer. `record` is the record of the
    collective to which the transfer belongs, for the timeline.
    """

    def __init__(
        self, running: Running, meter: Meter, kind: str, label: str, record: spans.OpenTransfer | None
    ) -> None:
        self.kind, self.label = kind, label
        self._record = meter.transfer(kind, label) if record is None else record
        self._running, self._lock, self._done, self._meter = running, threading.Lock(), False, meter
        self._error: BaseException | None = None
        self._needed: Needed = []
        self._advance(lambda needed: True)  # start the first requests now, in program order

    def _advance(self, may_go_on: Callable[[Needed], bool]) -> bool:
        """If the generator may go on, run it to its next yield; return True if it ran and has not ended.

        Any error, of MPI or of a device, is raised in the owner's wait, whichever thread advances it.
        """
        try:
            if not may_go_on(self._needed):
                return False
            self._needed = next(self._running)
        except StopIteration:
            self._done = True
            spans.end(self._record)
        except BaseException as error:
            self._done, self._error = True, error
            self._running = iter(())  # releases the generator's objects
        return not self._done

    def test(self) -> bool:
        if not self._lock.acquire(blocking=False):
            return False  # another thread advances it
        try:
            while not self._done and self._advance(has_come):
                pass
            return self._done
        finally:
            self._lock.release()

    def wait(self) -> None:
        def come(needed: Needed) -> bool:
            if callable(needed):
                while not needed():
                    time.sleep(CHECK_SECONDS)
            else:
                MPI.Request.Waitall(needed)
            return True

        with self._meter.waiting(self.kind, self.label), self._lock:
            while not self._done:
                self._advance(come)
        if self._error is not None:
            raise self._error


class ProgressEngine:
    """Set of the transfers in progress, which a thread or calls of `push` advance."""

    def __init__(self, threaded: bool, poll: float = POLL_SECONDS) -> None:
        self._active: list[Handle] = []
        self._changed = threading.Condition()
        self._closed, self._poll = False, poll
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="zero_mpi progress", daemon=True)
            self._thread.start()

    def add(self, handle: Handle) -> None:
        with self._changed:
            self._active.append(handle)
            self._changed.notify()

    def push(self) -> None:
        """Test all transfers in progress once, unless the thread does that."""
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
        """End the thread; all transfers must have been waited for."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
