"""What a run records: a line of `metrics.jsonl` a step, the progress of it, TensorBoard's files; from rank 0.

Floats are written in full precision, so two exact runs have the same text. A record that cannot be written
leaves no part of it, and none comes after it: `problem` says why, for all ranks to end by.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from zero_mpi.errors import FileError, explain, naming, writing
from zero_mpi.files.atomic import write_all, write_whole
from zero_mpi.files.open import open_file, read_lines
from zero_mpi.files.parse import parse_json
from zero_mpi.telemetry.progress_bar import Display
from zero_mpi.telemetry.tensorboard import TensorBoard

METRICS = "metrics.jsonl"
TAIL = 1 << 18  # bytes that hold the last records, also of thousands of ranks
MARK = b'"step"'  # in every record, and looked for first: a million other lines take no time
MOST_STEPS = 1 << 52  # a larger number is no step


class Records:
    """Writes the records of a run; on other ranks than 0 `step` and `close` do nothing.

    Raises JobError where it cannot begin, on rank 0 only.
    """

    def __init__(
        self, out: Path, rank: int, *, done: int, steps: int, log_every: int, tensorboard: bool = False
    ) -> None:
        self._active, self._done, self._steps, self._log_every = rank == 0, done, steps, log_every
        self.problem = ""
        if not self._active:
            return
        with writing(), naming(out / METRICS):
            keep_until(out / METRICS, done)
            self._file = (out / METRICS).open("ab", buffering=0)
            self._board = TensorBoard(out, done) if tensorboard else None
        self._display = Display(done, steps)

    def logs(self, step: int) -> bool:
        """Whether a step gets a line in the log for its number; the same on all ranks."""
        return step in (self._done + 1, self._steps) or step % self._log_every == 0

    def step(self, record: Mapping[str, Any]) -> None:
        """Write the record of one step."""
        if not self._active:
            return
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        try:
            if not self.problem:
                append_whole(self._file, (json.dumps(plain) + "\n").encode())
                if self._board is not None:
                    self._board.step(record)
        except OSError as error:
            self.problem = explain(error)
        self._display.step(record, self.logs(record["step"]) or "val_loss" in record)

    def close(self) -> None:
        """End the files and the bar."""
        if self._active:
            self._file.close()
            if self._board is not None:
                self._board.close()
            self._display.close()


def append_whole(file: FileIO, line: bytes) -> None:
    """Add a line, or nothing of it where it cannot be. OSError with the file's name."""
    before = file.seek(0, os.SEEK_END)
    with naming(file.name):
        try:
            write_all(file.fileno(), line)
        except OSError:
            file.truncate(before)
            raise


def last_step(path: Path) -> int:
    """The step of the last whole record; 0 if there is none."""
    return int(last_record(path).get("step", 0))


def last_record(path: Path) -> dict[str, Any]:
    """The last whole record; empty if there is none."""
    try:
        with open_file(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            tail = file.read(TAIL)
    except (OSError, FileError):
        return {}
    return next(filter(None, map(record_of, reversed(tail.splitlines()))), {})


def record_of(line: bytes) -> dict[str, Any]:
    """A record of a step; empty for a line that is none, such as one cut off by a crash."""
    if MARK not in line:
        return {}
    try:
        record = parse_json(line, null_for_infinite=True)
    except ValueError:
        return {}
    step = record.get("step") if isinstance(record, dict) else None
    return record if type(step) is int and 1 <= step <= MOST_STEPS else {}


def check(out: Path) -> None:
    """Raise UsageError where something else than a file of records is in its place."""
    if os.path.lexists(out / METRICS):
        open_file(out / METRICS, "a file of records").close()


def keep_until(path: Path, step: int) -> None:
    """Drop the records after `step`: a resumed run writes them again. What is no record goes as well."""
    lines = read_lines(path, MARK, "a file of records") if os.path.lexists(path) else ()
    kept = (line for line in lines if 0 < record_of(line).get("step", 0) <= step)
    write_whole(path, "".join(line.decode().rstrip("\r\n") + "\n" for line in kept))
