"""Writer of the records of a run on rank 0: to `metrics.jsonl`, the progress bar and the trackers.

The writer also writes the hash chain over records and checkpoints (`telemetry.proof`). Floats have full
precision, so two exact runs write the same losses. A record is written in full or not at all. After a failure
no more records are written; `problem` has the reason, and then all ranks end.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from zero_mpi.errors import FileError, explain, naming, writing
from zero_mpi.files.atomic import append_whole, write_whole
from zero_mpi.files.open import open_file, open_in_place, read_lines, refusing
from zero_mpi.files.parse import parse_json
from zero_mpi.telemetry import events
from zero_mpi.telemetry.progress_bar import Display
from zero_mpi.telemetry.proof import MOST_STEPS, PROOF, JobStart, Proof
from zero_mpi.telemetry.trackers import Tracker

METRICS = "metrics.jsonl"
TAIL = 1 << 18  # bytes at the end of a file that contain the last records, even of thousands of ranks
MARK = b'"step"'  # every record contains it, so lines without it are not parsed


class Records:
    """Writer of the records of a run; it does nothing on ranks other than 0.

    `trackers`: function that makes the trackers. `beginning`: start of this job in the hash chain, or None.
    Raises JobError on rank 0 if a file or a tracker cannot be opened.
    """

    def __init__(
        self,
        out: Path,
        rank: int,
        *,
        done: int,
        steps: int,
        log_every: int,
        trackers: Callable[[], Iterable[Tracker]] = tuple,
        beginning: JobStart | None = None,
    ) -> None:
        self._active, self._steps_before, self._steps, self._log_every = rank == 0, done, steps, log_every
        self.problem = ""
        self._chain: Proof | None = None
        if not self._active:
            return
        with writing(), naming(out / METRICS):
            keep_until(out / METRICS, done)
            self._file = open(out / METRICS, "ab", buffering=0, opener=open_in_place)  # noqa: SIM115 (close)
            self._trackers = list(trackers())
        with writing(), naming(out / PROOF):
            self._chain = None if beginning is None else Proof(out / PROOF, beginning)
        self._display = Display(done, steps)

    def logs(self, step: int) -> bool:
        """Return True if a step is logged because of its number; the result is the same on all ranks."""
        return step in (self._steps_before + 1, self._steps) or step % self._log_every == 0

    def step(self, record: Mapping[str, Any]) -> None:
        if not self._active:
            return
        plain = finite_or_none(record)

        def write() -> None:
            append_whole(self._file, (json.dumps(plain) + "\n").encode())
            if self._chain is not None:
                self._chain.record(plain["step"], plain)
            for tracker in self._trackers:
                tracker.step(record)

        self._attempt(write)
        self._display.step(record, self.logs(record["step"]) or "val_loss" in record)

    def saved(self, step: int, name: str, state: str) -> None:
        """Record a complete checkpoint of a step: its id, and the digest of its tensors."""
        if self._chain is not None:
            self._attempt(partial(self._chain.saved, step, name, state))

    @property
    def head(self) -> str:
        return "" if self._chain is None else self._chain.head

    def _attempt(self, write: Callable[[], None]) -> None:
        """Call write() unless an earlier write failed; if it fails, keep the reason."""
        try:
            if not self.problem:
                with naming(self._file.name):
                    write()
        except OSError as error:
            self.problem = explain(error)

    def close(self) -> None:
        """Close the files and the bar; if a file cannot be closed, keep the reason."""
        if self._active:
            self._attempt(self._file.close)
            if self._chain is not None:
                self._attempt(self._chain.close)
            for tracker in self._trackers:
                self._attempt(tracker.close)
            self._display.close()


def finite_or_none(value: Any) -> Any:
    """Return a record with None for values at any depth that are not finite, which JSON does not have."""
    if isinstance(value, Mapping):
        return {name: finite_or_none(each) for name, each in value.items()}
    if isinstance(value, list):
        return list(map(finite_or_none, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def last_step(path: Path) -> int:
    """Return the step of the last complete record; 0 if there is none."""
    return int(last_record(path).get("step", 0))


def last_record(path: Path) -> dict[str, Any]:
    """Return the last complete record; empty if there is none."""
    try:
        with open_file(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            tail = file.read(TAIL)
    except (OSError, FileError):
        return {}
    return next(filter(None, map(record_of, reversed(tail.splitlines()))), {})


def record_of(line: bytes) -> dict[str, Any]:
    """Return the record in a line; empty for any other line, such as one cut off by a crash."""
    if MARK not in line:
        return {}
    try:
        record = parse_json(line, null_for_infinite=True)
    except ValueError:
        return {}
    step = record.get("step") if isinstance(record, dict) else None
    return record if type(step) is int and 1 <= step <= MOST_STEPS else {}


def check(out: Path) -> None:
    """Raise UsageError if a file that a job appends to is a link or not a regular file."""
    for name in (METRICS, PROOF, events.NAME):
        if os.path.lexists(out / name):
            with refusing("", out / name, "cannot be written"):
                os.close(open_in_place(out / name, os.O_RDONLY))


def keep_until(path: Path, step: int) -> None:
    """Remove the records after `step`, which a resumed run writes again, and lines that are not records."""
    lines = read_lines(path, MARK, "a file of records") if os.path.lexists(path) else ()
    selected = (line for line in lines if 0 < record_of(line).get("step", 0) <= step)
    write_whole(path, "".join(line.decode().rstrip("\r\n") + "\n" for line in selected))
