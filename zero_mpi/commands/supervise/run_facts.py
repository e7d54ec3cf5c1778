"""What the folder of a run shows to one who looks from outside: its word, its step, its checkpoint, its life.

Nothing is ever raised here: a run that says nothing is one of which nothing is known.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zero_mpi.checkpoint.folders import LATEST
from zero_mpi.errors import UsageError
from zero_mpi.launch import folder_lock
from zero_mpi.telemetry import events, status
from zero_mpi.telemetry.metrics import METRICS, last_step

SIGNS = (METRICS, events.NAME, status.NAME, folder_lock.NAME)  # a run renews the last two all the time
LOOK = 0.2  # seconds between looks at a lock

Signs = tuple[tuple[int, int], ...]


class RunFacts:
    """The folder of a run, or none."""

    def __init__(self, out: Path | None) -> None:
        self.out = out

    def word(self) -> Mapping[str, Any]:
        """What status.json says now."""
        return {} if self.out is None else status.read_status(self.out / status.NAME)

    def step(self) -> int:
        """The last step that was recorded."""
        return 0 if self.out is None else last_step(self.out / METRICS)

    def checkpoint(self) -> tuple[str, int]:
        """The newest complete checkpoint: its name, and when it was made; empty where there is none."""
        if self.out is None:
            return "", 0
        try:
            folder = self.out / LATEST
            return Path(os.readlink(folder)).name, os.stat(folder).st_mtime_ns
        except OSError:
            return "", 0

    @property
    def origin(self) -> str:
        """What the next start goes on from, for people."""
        return self.checkpoint()[0] or "the start"

    def signs(self) -> Signs:
        """What changes while a run lives: its records, its word and its lock."""
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
