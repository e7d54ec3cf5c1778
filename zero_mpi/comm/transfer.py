"""Transfers of several steps, as generators that any idle thread pushes on.

A generator yields what it needs next: a list of MPI requests that must be complete, or a function that says
whether something has come about (a counter in shared memory has risen). So a reduction in chunks, or one that
goes on from node to node, moves by a thread, by a test between layers, or in the wait of its owner.

Where a core is free one thread tests what is in progress and sleeps between rounds (`ProgressEngine`); where
ranks fill the cores it would only take time from the computation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from zero_mpi.comm.base import Handle
from zero_mpi.comm.meter import Meter
from zero_mpi.comm.start_mpi import MPI
from zero_mpi.telemetry import spans

Needed = list[Any] | Callable[[], bool]  # MPI requests, or a function that tells if it is complete
Running = Iterator[Needed]
CHECK_SECONDS = 2e-5  # seconds between looks at something that is no request
POLL_SECONDS = 2e-4  # seconds between rounds of the thread; a busier or an adaptive poll hid no more


def has_come(needed: Needed) -> bool:
    """Return whether a transfer can continue."""
    return needed() if callable(needed) else bool(MPI.Request.Testall(needed))


@contextmanager
def borrowed(free: list[Any], new: Callable[[], Any]) -> Iterator[Any]:
    """Lend an object from a list of free ones, or a new one; it is free again afterwards."""
    try:  # another thread may be here as well
        lent = free.pop()
    except IndexError:
        lent = new()
    try:
        yield lent
    finally:
        free.append(lent)


class Transfer(Handle):
    """Runner of a generator that yields what it needs next; `test` and `wait` drive it.

    The lock lets the progress thread and the owner push the same transfer. `record`: the record of the
    collective that the transfer is part of, for the timeline.
    """

    def __init__(
        self, running: Running, meter: Meter, kind: str, label: str, record: spans.OpenTransfer | None
    ) -> None:
        self.kind, self.label = kind, label
        self._record = meter.transfer(kind, label) if record is None else record
        self._running, self._lock, self._done, self._meter = running, threading.Lock(), False, meter
        self._error: BaseException | None = None
        self._needed: Needed = []
        self._advance(lambda needed: True)  # the first requests start now, in program order

    def _advance(self, may_go_on: Callable[[Needed], bool]) -> bool:
        """Continue if possible; return whether there is more to do.

        Any error, of MPI or of a device, is raised where the owner waits, whichever thread pushed.
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
            self._running = iter(())  # and what it held is free for others
        return not self._done

    def test(self) -> bool:
        if not self._lock.acquire(blocking=False):
            return False  # another thread pushes it
        try:
            while not self._done and self._advance(has_come):
                pass
            return self._done
        finally:
            self._lock.release()

    def wait(self) -> None:
        def come(needed: Needed) -> bool:
            if not callable(needed):
                MPI.Request.Waitall(needed)
                return True
            while not needed():
                time.sleep(CHECK_SECONDS)
            return True

        with self._meter.waiting(self.kind, self.label), self._lock:
            while not self._done:
                self._advance(come)
        if self._error is not None:
            raise self._error


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
