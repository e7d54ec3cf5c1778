"""`OUT/status.json`: whether a run goes on, is done, or why it ended; for scripts and for people.

A launcher's exit status is no proof: 0 was seen where a host was lost. So "done" is written by rank 0 after
all ranks have come to the end. While a run goes on a thread renews the file every few seconds, so a job that
was killed shows by its age. Whichever rank ends a job for a failure says why. The file is replaced by a
rename, so nobody reads half of it; it is not brought to disk each time, and no step waits for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zero_mpi import __version__

NAME = "status.json"
RUNNING, DONE, STOPPED, FAILED = "running", "done", "stopped", "failed"
EVERY = 5.0  # seconds between renewals
PATIENCE = 2.0  # seconds that the last word waits for a renewal under way: the disk may hang


class Status:
    """The file of a job as one rank sees it. Never raises: what goes wrong here is not worth a run.

    Fields: state, reason (why it failed), step and steps, ranks; host and pid of rank 0; started and updated,
    in UTC; version of the package.
    """

    def __init__(self, out: Path, rank: int, ranks: int, steps: int) -> None:
        self._path, self._rank, self._step, self._steps = out / NAME, rank, 0, steps
        self._about: Mapping[str, Any] = {
            "ranks": ranks,
            "host": platform.node(),
            "pid": os.getpid(),
            "started": utc_now(),
        }
        self._lock, self._over = threading.Lock(), threading.Event()
        self._before = ""  # what the run before this one has left

    def begin(self) -> None:
        """Rank 0 says that the job runs, and goes on saying so."""
        if self._rank == 0:
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._before = self._path.read_text(errors="replace")
            self._write(RUNNING)
            threading.Thread(target=self._renew, name="zero_mpi status", daemon=True).start()

    def before(self) -> dict[str, Any]:
        """What the run before this one has left in the file; empty if nothing."""
        return as_object(self._before)

    def at(self, step: int) -> None:
        """So many steps are done."""
        self._step = step

    def _renew(self) -> None:
        while not self._over.wait(EVERY):
            with self._lock:
                if self._over.is_set() or self._read().get("state") == FAILED:
                    return  # another rank ends the job
                self._write(RUNNING)

    def end(self, state: str, reason: str = "") -> None:
        """The last word, of any rank; a failure that comes after it, on the way out, changes nothing."""
        self._over.set()
        locked = self._lock.acquire(timeout=PATIENCE)
        said = self._read()
        if said.get("state") == RUNNING and self._rank != 0:  # the job's place and time are rank 0's
            self._about = {key: said.get(key) for key in self._about}
        is_over = said.get("state") in (DONE, STOPPED, FAILED) and self._is_ours(said)
        if state != FAILED or not is_over:
            self._write(state, reason)
        if locked:
            self._lock.release()

    def refused(self, reason: str) -> None:
        """The run was not begun: the last word of the one before it holds, if there was one."""
        before, self._before = self._before, ""
        self.end(FAILED, reason)
        if before:
            self._put(before)

    def _is_ours(self, said: Mapping[str, Any]) -> bool:
        """Whether this job has written that; only rank 0 can know."""
        return self._rank != 0 or all(said.get(key) == value for key, value in self._about.items())

    def _read(self) -> dict[str, Any]:
        try:
            return as_object(self._path.read_text())
        except (OSError, ValueError):
            return {}

    def _write(self, state: str, reason: str = "") -> None:
        entry = {"state": state, "reason": reason, "step": self._step, "steps": self._steps, **self._about}
        self._put(json.dumps({**entry, "updated": utc_now(), "version": __version__}, indent=1) + "\n")

    def _put(self, text: str) -> None:
        partial = self._path.with_name(f".{NAME}.{self._rank}")
        try:
            partial.write_text(text)
            partial.replace(self._path)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
                self._path.write_text(text)  # a full disk has room for what is there already


def as_object(text: str) -> dict[str, Any]:
    """The JSON object in a text; empty for anything else."""
    try:
        said = json.loads(text)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def utc_now() -> str:
    """The time, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
