"""`OUT/events.jsonl`: the events of a run with their times, over all its jobs; one JSON object per line.

Steps are in `metrics.jsonl`; this file has all other events: starts, resumes, checkpoints, warnings and ends.
Lines are only appended, even if a run resumes at an earlier step. Rank 0 writes all events except a failure,
which the rank that ends the job writes. A write error is reported once and does not end a run.
"""

import json
import logging
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zero_mpi.files.foreign import shown
from zero_mpi.files.open import open_in_place
from zero_mpi.telemetry import log

NAME = "events.jsonl"
STARTED, RESUMED, LOST, SAVED, SAMPLE, WARNING = "started", "resumed", "lost", "saved", "sample", "warning"
STOPPED, FAILED, DONE, EARLY_STOP = "stopped", "failed", "done", "early-stop"
RESTARTED, GAVE_UP = "restarted", "gave-up"  # written by `supervise`, between two jobs


class Events(logging.Handler):
    """Writer of the events of one rank. `at` sets the current step; `reason` is why the run was stopped.

    The writer is also a log handler: from `begin` to `end` each warning of rank 0 becomes an event.
    """

    def __init__(self, out: Path, rank: int, lost: Callable[[], str] = str) -> None:
        super().__init__(logging.WARNING)
        self._path, self._rank, self._step, self._lost = out / NAME, rank, 0, lost
        self._begun = self._ended = self._broken = False
        self.reason = ""

    def begin(self, step: int, previous: Mapping[str, Any], **facts: Any) -> None:
        """Write that the previous job was lost, if its status.json shows this, and that this job starts."""
        self._step = step
        if previous.get("state") == "running":
            ranks, host, time = (shown(previous.get(key, "unknown")) for key in ("ranks", "host", "updated"))
            reason = f"{ranks} rank(s), rank 0 on {host}, last seen at {time}: it was killed, or lost a host"
            self.note(LOST, reason=reason, step=previous.get("step", 0))
        self.note(STARTED, **facts)
        self._begun = True
        if self._rank == 0:
            log.logger.addHandler(self)

    def at(self, step: int) -> None:
        self._step = step

    def note(self, event: str, **facts: Any) -> None:
        if self._rank == 0:
            self._append(event, facts)

    def emit(self, record: logging.LogRecord) -> None:
        self.note(WARNING, text=record.getMessage(), **getattr(record, "facts", {}))

    def end(self, event: str, reason: str = "") -> None:
        """Write the job's last event, once, on any rank; without `begin`, write only a failure."""
        log.logger.removeHandler(self)
        if self._ended or not (self._begun or event == FAILED):
            return
        self._ended = True
        if self._path.parent.is_dir():
            self._append(event, {"reason": reason or self.reason})

    def _append(self, event: str, facts: Mapping[str, Any]) -> None:
        if self._lost():
            return
        entry = {"time": utc(), "event": event, "step": self._step, **facts}
        try:
            append_line(self._path, json.dumps(entry))
        except OSError as error:
            if not self._broken:
                self._broken = True
                log.warning("%s cannot be written: %s", shown(self._path), error.strerror or error)


def append_line(path: Path, text: str) -> None:
    """Append a line in one write, after ending a line that a crash cut off. Raise OSError if it fails.

    `open_in_place` refuses pipes, because a pipe without a reader would block after some lines.
    """
    handle = open_in_place(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        size = os.fstat(handle).st_size
        cut_off = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        os.write(handle, ("\n" * cut_off + text + "\n").encode())
    finally:
        os.close(handle)


def utc() -> str:
    """Return the time in UTC as ISO 8601, in whole seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
