"""Sums over ranks that never wait: what was done, a problem of any rank, the end of the work.

A sum begins as soon as the last one has come to all ranks, so a rank in the middle of a large document keeps
nobody from work, and all ranks learn from the same sum that the work ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from zero_mpi.cli.text import percent
from zero_mpi.comm.base import Handle
from zero_mpi.errors import JobError, UsageError
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.launch.world import World
from zero_mpi.telemetry import log
from zero_mpi.telemetry.progress_bar import interval, short, watched

EVERY, PAUSE = 0.1, 0.01  # seconds between sums, and between looks of a rank that is done
WATCHED, LOGGED = 5.0, 60.0  # seconds between lines, for a person who watches and for a log


class Amount(NamedTuple):
    """Weight of pieces, bytes of text, documents and tokens that were done."""

    weight: int = 0
    text_bytes: int = 0
    documents: int = 0
    tokens: int = 0


NOTHING = Amount()


class Pulse:
    """Work of all ranks, and the sums of what is done of it: `beat` begins and takes them.

    what     the work, as the watchdog names it
    total    weight of the work, of which an earlier job has done `before`
    stops    whether this rank wants all to stop
    """

    def __init__(
        self, world: World, watchdog: Watchdog, what: str, total: int,
        before: int = 0, stops: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._world, self._moved, self._stops = world, partial(watchdog.beat, what), stops
        self._what, self._before, self._total = what, before, max(total, 1)
        self._mine, self._sum = np.zeros(len(NOTHING)), np.zeros(0)
        self._handle: Handle | None = None
        self._finished = self._over = self._is_done = False
        self._problems = list[Exception]()
        self._begun = self._said = time.monotonic()
        self._due = 0.0

    def run(self, work: Callable[[Pulse], None]) -> bool:
        """Let each rank do its `work`; returns whether all came to the end of it. Collective.

        A problem of one rank stops all, and is raised on all.
        """
        try:
            work(self)
        except (UsageError, JobError) as error:
            self._problems.append(error)
        self._finished = True
        while self.beat():
            time.sleep(PAUSE)
        self._world.together(self._raise_first)
        return self._is_done

    def _raise_first(self) -> None:
        if self._problems:
            raise self._problems[0]

    def beat(self, amount: Amount = NOTHING) -> bool:
        """Add what was done since the last call; False once all ranks are to stop."""
        self._mine += amount
        if any(amount):
            self._moved()
        if not self._over and self._handle is None and (self._finished or time.monotonic() >= self._due):
            self._sum = np.array(
                [*self._mine, self._finished, bool(self._problems) or self._stops()], np.float64
            )
            self._handle = self._world.comm.allreduce(self._sum, "what was done")
            self._due = time.monotonic() + EVERY
        if self._handle is not None:
            self._world.comm.progress()
            if self._handle.test():
                self._handle.wait()
                self._handle = None
                self._take(*self._sum.tolist())
        return not self._over

    def _take(self, weight: float, text_bytes: float, *rest: float) -> None:
        documents, tokens, finished, stops = rest
        self._moved()  # all ranks live
        self._is_done = finished == self._world.size
        self._over = self._is_done or stops > 0
        now = time.monotonic()
        if self._world.rank == 0 and now - self._said > (WATCHED if watched() else LOGGED):
            self._said, seconds = now, now - self._begun
            left = self._total - self._before - weight
            facts = [percent((self._before + weight) / self._total), self._what]
            facts += [f"{short(documents)} documents", f"{short(tokens)} tokens"] if documents else []
            facts += [f"{text_bytes / 1e6 / seconds:.3g} MB/s"]
            facts += [f"{interval(seconds * left / weight)} left"] if weight else []
            log.info("%s", "  ".join(facts))
