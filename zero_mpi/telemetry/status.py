"""`OUT/status.json`: state of a run (running, done, stopped or failed), for scripts and people.

A launcher's exit status is unreliable: some launchers return 0 although a host was lost. So rank 0 writes
"done" after all ranks have reached the end. During a run a thread renews the file every few seconds, so an
old file means that the job was killed. The rank that ends a job after a failure writes the reason. A rename
replaces the file, so a reader never sees an incomplete file, and no step waits for it.
"""

import contextlib
import json
import os
import platform
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zero_mpi import __version__
from zero_mpi.errors import FileError
from zero_mpi.files.atomic import write_whole
from zero_mpi.files.open import open_in_place, read_file
from zero_mpi.files.parse import parse_json

NAME = "status.json"
RUNNING, DONE, STOPPED, FAILED = "running", "done", "stopped", "failed"
MOST_BYTES = 1 << 20  # maximum size of the file in bytes
RENEWAL_SECONDS = 5.0  # seconds between renewals
DISK_BLOCK = 4096  # bytes; minimum space that a file takes on a disk
RENEWAL_WAIT = 2.0  # maximum seconds that the last write waits for a renewal in progress: the disk may hang


class Status:
    """Writer of a job's status on one rank. It never raises, as a write error must not end a run.

    Fields: state, reason (why it failed), step and steps, ranks; host and pid of rank 0; started and updated,
    in UTC; version of the package. `steps` and `slow`, the slow ranks, may be set later. If `lost()`
    returns why the folder no longer belongs to this job, nothing is written.
    """

    def __init__(self, out: Path, rank: int, ranks: int, steps: int, lost: Callable[[], str] = str) -> None:
        self._path, self._rank, self._step, self.steps = out / NAME, rank, 0, steps
        fields = {"ranks": ranks, "host": platform.node(), "pid": os.getpid()}
        self._job: Mapping[str, Any] = {**fields, "started": _now()}
        self._lock, self._ended, self._lost = threading.Lock(), threading.Event(), lost
        self._previous = b""  # content of the previous job's file
        self.slow = ""

    def begin(self) -> None:
        """Write on rank 0 that the job runs, and renew the file from now on."""
        if self._rank == 0:
            with contextlib.suppress(OSError, FileError):
                self._previous = read_file(self._path, MOST_BYTES)
            self._write(RUNNING)
            threading.Thread(target=self._renew, name="zero_mpi status", daemon=True).start()

    def before(self) -> dict[str, Any]:
        """Return the status of the previous job; empty if there is none."""
        return as_object(self._previous)

    def at(self, step: int) -> None:
        self._step = step

    def _renew(self) -> None:
        while not self._ended.wait(RENEWAL_SECONDS):
            with self._lock:
                if self._ended.is_set() or read_status(self._path).get("state") == FAILED:
                    return  # because another rank ends the job
                self._write(RUNNING)

    def end(self, state: str, reason: str = "") -> None:
        """Write the last state, on any rank; a failure after that does not change it."""
        self._ended.set()
        locked = self._lock.acquire(timeout=RENEWAL_WAIT)
        status = read_status(self._path)
        if status.get("state") == RUNNING and self._rank != 0:  # rank 0 wrote host and start time
            self._job = {key: status.get(key) for key in self._job}
        # Only rank 0 knows whether this job has written the file.
        is_ours = self._rank != 0 or all(status.get(key) == value for key, value in self._job.items())
        is_over = status.get("state") in (DONE, STOPPED, FAILED) and is_ours
        if state != FAILED or not is_over:
            self._write(state, reason)
        if locked:
            self._lock.release()

    def refused(self, reason: str) -> None:
        """Write why the run did not start, then put back the status of the previous run, if there was one."""
        content, self._previous = self._previous, b""
        self.end(FAILED, reason)
        if content:
            self._put(content)

    def _write(self, state: str, reason: str = "") -> None:
        entry = {"state": state, "reason": reason, "step": self._step, "steps": self.steps, **self._job}
        if self.slow:
            entry["slow"] = self.slow
        entry |= {"updated": _now(), "version": __version__}
        self._put(f"{json.dumps(entry, indent=1)}\n".encode())

    def _put(self, text: bytes) -> None:
        if self._lost():
            return
        try:
            write_whole(self._path, text, suffix=str(self._rank))
        except OSError:
            with contextlib.suppress(OSError):
                overwrite(self._path, text)


def overwrite(path: Path, text: bytes) -> None:
    """Overwrite a file in place in one write, which works even on a full disk. Raise OSError if it fails.

    If either text exceeds DISK_BLOCK, or the write fails, the old text stays. Blanks may pad the new text.
    """
    handle = open_in_place(path, os.O_WRONLY)
    try:
        size = os.fstat(handle).st_size
        if max(size, len(text)) <= DISK_BLOCK:
            os.pwrite(handle, text.rstrip(b"\n").ljust(size - 1) + b"\n", 0)
    finally:
        os.close(handle)


def read_status(path: Path) -> dict[str, Any]:
    """Return the content of a status.json; empty if the file is missing or invalid."""
    try:
        return as_object(read_file(path, MOST_BYTES))
    except FileError:
        return {}


def as_object(text: bytes) -> dict[str, Any]:
    """Return the JSON object in a text, without lists and objects in it; empty for any other text."""
    try:
        entry = parse_json(text, null_for_infinite=True)
    except ValueError:
        return {}
    items = entry.items() if isinstance(entry, dict) else ()
    return {name: value for name, value in items if not isinstance(value, dict | list)}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
