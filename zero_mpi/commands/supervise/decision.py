"""What the end of a run means: done, saved, refused, or worth another start.

The run's own word in status.json goes before the launcher's status: 0 was seen where a host was lost, and 1
where Open MPI's launcher was told to stop and the run had saved. A failure that comes again at the same step,
on the same hosts and without a new checkpoint in between will come a third time.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zero_mpi.files.foreign import one_line
from zero_mpi.launch.ending import BAD_USAGE, FAILED, REQUEUE
from zero_mpi.launch.stopping import INTERRUPTED
from zero_mpi.telemetry import status as words

MOST_REASON = 400  # letters of a reason


@dataclass(frozen=True)
class Ending:
    """How a start ended.

    status    of the launcher, as a shell says it
    said      what the run has said of itself in status.json; empty where this start has said nothing
    ended_for why it was ended from here; empty where it ended by itself
    step      the last that was recorded; progressed: whether it got further
    """

    status: int
    said: Mapping[str, Any]
    ended_for: str = ""
    step: int = 0
    progressed: bool = False

    @property
    def reason(self) -> str:
        """Why it failed, for people."""
        state, why = self.said.get("state"), self.said.get("reason")
        if state == words.FAILED and isinstance(why, str) and why:
            return one_line(why)[:MOST_REASON]
        if self.ended_for:
            return self.ended_for
        lost = ": killed, or a host was lost" if state == words.RUNNING else ""
        return f"status {self.status}{named(self.status)}{lost}"


def named(status: int) -> str:
    """The signal that a shell's status stands for."""
    try:
        return f" ({signal.Signals(status - 128).name})" if status > 128 else ""
    except ValueError:
        return ""


def final_status(ending: Ending, told: bool) -> int | None:
    """The exit status after an end that is the last one; None: the run is to be started again.

    told: whether the run was told to stop.
    """
    state = ending.said.get("state")
    if state == words.DONE or (ending.status == 0 and state is None and not ending.ended_for):
        return 0
    if state == words.STOPPED or ending.status == REQUEUE:
        return REQUEUE
    if ending.status in (BAD_USAGE, INTERRUPTED) and not ending.ended_for:
        return ending.status
    if told:
        return REQUEUE if state is None else failure_status(ending)
    return None


def failure_status(ending: Ending) -> int:
    """The exit status of a failure, which is never one that means something else."""
    return FAILED if ending.status in (0, BAD_USAGE, REQUEUE) else ending.status


def fingerprint(ending: Ending, hosts: tuple[str, ...]) -> tuple[object, ...]:
    """What is the same where the same failure comes again: numbers in its reason do not count."""
    return ending.status, re.sub(r"\d+(\.\d+)?", "N", ending.reason), ending.step, hosts
