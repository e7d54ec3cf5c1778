"""Decides what the end of a run means: done, saved, refused, or worth another start.

The run's status.json takes precedence over the launcher's status: 0 was seen where a host was lost, and 1
where Open MPI's launcher was asked to stop and the run had saved. A failure that repeats at the same step,
on the same hosts and without a new checkpoint in between will come a third time.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_mpi.checkpoint.folders import LATEST
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import one_line
from zero_mpi.launch import folder_lock
from zero_mpi.launch.ending import BAD_USAGE, FAILED, REQUEUE
from zero_mpi.launch.stopping import INTERRUPTED
from zero_mpi.telemetry import events, status
from zero_mpi.telemetry import status as words
from zero_mpi.telemetry.metrics import METRICS, last_step

MOST_REASON = 400  # most letters of a reason


@dataclass(frozen=True)
class Ending:
    """End of a start."""

    status: int  # exit status of the launcher, as a shell reports it
    said: Mapping[str, Any]  # status.json of the run; empty if this start has written none
    ended_for: str = ""  # why the supervisor ended it; empty if it ended by itself
    step: int = 0  # the last that was recorded
    progressed: bool = False  # whether there is a new checkpoint

    @property
    def reason(self) -> str:
        """Return why it failed, for messages."""
        state, why = self.said.get("state"), self.said.get("reason")
        if state == words.FAILED and isinstance(why, str) and why:
            return one_line(why)[:MOST_REASON]
        if self.ended_for:
            return self.ended_for
        lost = ": killed, or a host was lost" if state == words.RUNNING else ""
        return f"status {self.status}{named(self.status)}{lost}"


def named(status: int) -> str:
    """Return the signal that a shell's status stands for."""
    try:
        return f" ({signal.Signals(status - 128).name})" if status > 128 else ""
    except ValueError:
        return ""


def final_status(ending: Ending, told: bool) -> int | None:
    """Return the exit status after the last end; None: the run must be started again.

    told: whether the run was asked to stop.
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
    """Return the exit status of a failure, never one that means something else."""
    return FAILED if ending.status in (0, BAD_USAGE, REQUEUE) else ending.status


def fingerprint(ending: Ending, hosts: tuple[str, ...]) -> tuple[object, ...]:
    """Return values that repeat if a failure repeats: numbers in its reason are ignored."""
    return ending.status, re.sub(r"\d+(\.\d+)?", "N", ending.reason), ending.step, hosts


SIGNS = (METRICS, events.NAME, status.NAME, folder_lock.NAME)  # a run renews the last two all the time
LOOK = 0.2  # seconds between looks at a lock

Signs = tuple[tuple[int, int], ...]


class RunFacts:
    """Facts in the folder of a run, or of none."""

    def __init__(self, out: Path | None) -> None:
        self.out = out

    def word(self) -> Mapping[str, Any]:
        """Return the current content of status.json."""
        return {} if self.out is None else status.read_status(self.out / status.NAME)

    def step(self) -> int:
        return 0 if self.out is None else last_step(self.out / METRICS)

    def checkpoint(self) -> tuple[str, int]:
        """Return name and time of the newest complete checkpoint; an empty name if there is none."""
        if self.out is None:
            return "", 0
        try:
            folder = self.out / LATEST
            return Path(os.readlink(folder)).name, os.stat(folder).st_mtime_ns
        except OSError:
            return "", 0

    @property
    def origin(self) -> str:
        """Origin of the next start, for messages."""
        return self.checkpoint()[0] or "the start"

    def signs(self) -> Signs:
        """Return times and sizes of the files that change while a run lives: records, status and lock."""
        return tuple(self._signs())

    def _signs(self) -> Iterator[tuple[int, int]]:
        for path in [self.out / name for name in SIGNS] if self.out is not None else ():
            with contextlib.suppress(OSError):
                about = os.stat(path)
                yield about.st_mtime_ns, about.st_size

    def await_release(self, seconds: float, is_over: Callable[[], bool]) -> None:
        """Wait while a process of this machine still holds the folder: a rank that its launcher has left."""
        until = time.monotonic() + seconds
        while self._is_held_here() and time.monotonic() < until and not is_over():
            time.sleep(LOOK)

    def _is_held_here(self) -> bool:
        if self.out is None:
            return False
        try:
            handle = folder_lock.find(self.out / folder_lock.NAME)
        except (OSError, UsageError):
            return False
        try:
            record = folder_lock.unpacked(folder_lock.read(handle))
            is_here = record is not None and record.machine == folder_lock.machine()
            return is_here and folder_lock.lock(handle) is False
        except OSError:
            return False
        finally:
            os.close(handle)

    def note(self, event: str, step: int, **about: Any) -> None:
        """Write an event down, while no run does."""
        if self.out is not None and self.out.is_dir():
            writer = events.Events(self.out, 0)
            writer.at(step)
            writer.note(event, **about)
