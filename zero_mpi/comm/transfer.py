"""A transfer of several steps, as a generator that any idle thread pushes on.

It yields what it needs next: a list of MPI requests that must be complete, or a function that says whether
something has come about (a counter in shared memory has risen). So a reduction in pieces, or one that goes on
from node to node, moves by the `progress_thread`, by a test between layers, or in the wait of its owner.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from zero_mpi.comm.base import Comm, Handle
from zero_mpi.comm.meter import Meter
from zero_mpi.comm.start_mpi import MPI
from zero_mpi.telemetry import spans

Needed = list[Any] | Callable[[], bool]  # MPI requests, or whether it has come about
Running = Iterator[Needed]
POLL_SECONDS = 2e-5  # seconds between looks at something that is no request


class Transfer(Handle):
    """Runner of a generator that yields what it needs next; `test` and `wait` drive it.

    The lock lets the progress thread and the owner push the same transfer. `record`: that of the collective
        which this is a part of, for the timeline.
    """

    def __init__(
        self,
        running: Running,
        meter: Meter,
        kind: str = "transfer",
        label: str = "",
        record: spans.OpenTransfer | None = None,
    ) -> None:
        self.kind, self.label = kind, label
        self._record = meter.transfer(kind, label) if record is None else record
        self._running, self._lock, self._done, self._meter = running, threading.Lock(), False, meter
        self._error: BaseException | None = None
        self._needed: Needed = []
        self._advance(lambda: True)  # the first requests start now, in program order

    def _advance(self, has_come: Callable[[], bool]) -> bool:
        """Go on if what is needed has come about; return whether there is more to do then.

        Any error, of MPI or of a device, is raised where the owner waits, whichever thread pushed.
        """
        try:
            if not has_come():
                return False
            self._needed = next(self._running)
        except StopIteration:
            self._done = True
            spans.end(self._record)
        except BaseException as error:
            self._done, self._error = True, error
            self._running = iter(())  # and what it held is free for others
        return not self._done

    def _may_advance(self) -> bool:
        if callable(self._needed):
            return self._needed()
        return bool(MPI.Request.Testall(self._needed))

    def test(self) -> bool:
        if not self._lock.acquire(blocking=False):
            return False  # another thread pushes it
        try:
            while not self._done and self._advance(self._may_advance):
                pass
            return self._done
        finally:
            self._lock.release()

    def wait(self) -> None:
        with self._meter.waiting(self.kind, self.label), self._lock:
            while not self._done:
                self._advance(self._wait_for_needed)
        if self._error is not None:
            raise self._error

    def _wait_for_needed(self) -> bool:
        if not callable(self._needed):
            MPI.Request.Waitall(self._needed)
            return True
        while not self._needed():
            time.sleep(POLL_SECONDS)
        return True


class MessageComm(Comm):
    """A transport of messages, on which those of nodes are built."""

    @abstractmethod
    def over(self, comm: Any) -> MessageComm:
        """Return a transport over another communicator, such as that of a node; whoever waits pushes it."""

    @abstractmethod
    def start(
        self,
        running: Running,
        kind: str = "transfer",
        label: str = "",
        record: spans.OpenTransfer | None = None,
    ) -> Handle:
        """Begin a transfer and look after it until it is complete; `record`: that of the whole around it."""

    @abstractmethod
    def poke_progress(self) -> None:
        """Let the library move what it still owes to others, though the request for it was complete."""
