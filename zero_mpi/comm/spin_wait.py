"""Waiting for another rank that will soon have written something into shared memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

SPINS = 200  # hand-overs of the core before the first sleep; about a tenth of a millisecond
SHORTEST, LONGEST = 2e-5, 2e-4  # seconds of sleep: the first one, and what they grow to


def wait_until(ready: Callable[[], bool], crowded: bool) -> None:
    """Return when `ready()` is true.

    A waiting rank is in the way of the other one if they share a core (`crowded`): then it sleeps at once.
    Yielding the core without sleep is not enough, the scheduler may hand it back. Otherwise answers come
    within microseconds, and only a long wait turns to sleep, for the other threads' sake.
    """
    spins, pause = 0 if crowded else SPINS, SHORTEST
    while not ready():
        if spins:
            spins -= 1
            os.sched_yield()
        else:
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST)
