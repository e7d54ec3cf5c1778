"""What ranks know of each other while each is at its own parts: sums that go round all the time.

A sum begins as soon as the one before has come to all ranks; nobody waits for it, so a rank in the middle of
a large document keeps nobody from work. What ends the work, all of it done, a signal or a problem, is in the
sum, so all ranks learn it from the same one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from zero_mpi.comm.base import Comm, Handle

EVERY, PAUSE = 0.1, 0.01  # seconds between sums, and between looks of a rank that is done


class Amount(NamedTuple):
    """How much was done: weight of pieces, bytes of text, documents, tokens."""

    weight: int = 0
    text_bytes: int = 0
    documents: int = 0
    tokens: int = 0


NOTHING = Amount()


class Pulse:
    """Sums over ranks of what was done, and whether to go on.

    stops   whether this rank wants all to stop
    tell    is given what all have done, at each sum, if somebody wants to know
    moved   is called when this rank has done something, and when a sum has come, so all ranks live

    `is_done`: all ranks have come to the end of their parts.
    """

    def __init__(
        self,
        comm: Comm,
        stops: Callable[[], bool],
        tell: Callable[[Amount], object] | None,
        moved: Callable[[], object],
    ) -> None:
        self._comm, self._stops, self._tell, self._moved = comm, stops, tell, moved
        self._mine = np.zeros(len(Amount()))
        self._finished = self._over = self.is_done = False
        self._handle: Handle | None = None
        self._room, self._next = np.zeros(0), 0.0

    def beat(self, amount: Amount = NOTHING) -> bool:
        """Tell what was done since the last time; False once all ranks are to stop."""
        self._mine += amount
        if any(amount):
            self._moved()
        is_due = self._finished or time.monotonic() >= self._next
        if not self._over and self._handle is None and is_due:
            self._room = np.array([*self._mine, self._finished, self._stops()], np.float64)
            self._handle = self._comm.allreduce(self._room, "what was done")
            self._next = time.monotonic() + EVERY
        if self._handle is not None:
            self._comm.progress()
            if self._handle.test():
                self._take(self._handle)
        return not self._over

    def finish(self) -> None:
        """Come to the end of this rank's parts, and wait until all have, or are to stop."""
        self._finished = True
        while self.beat():
            time.sleep(PAUSE)

    def _take(self, handle: Handle) -> None:
        """Take a sum that has come."""
        handle.wait()
        self._handle = None
        self._moved()
        *done, finished, stops = self._room.tolist()
        if self._tell is not None:
            self._tell(Amount(*map(int, done)))
        self.is_done = finished == self._comm.size
        self._over = self.is_done or stops > 0
