"""What a run records: a line of `metrics.jsonl` a step, the progress of it, TensorBoard's files; from rank 0.

Floats are written in full precision, so two exact runs have the same text.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_mpi.errors import naming
from zero_mpi.progress import Display
from zero_mpi.tensorboard import TensorBoard

METRICS = "metrics.jsonl"
TAIL = 1 << 18  # bytes that hold the last records, also of thousands of ranks


class Records:
    """Writes the records of a run; on other ranks than 0 `step` and `close` do nothing."""

    def __init__(
        self, out: Path, rank: int, *, done: int, steps: int, log_every: int, tensorboard: bool = False
    ) -> None:
        self._active, self._done, self._steps, self._log_every = rank == 0, done, steps, log_every
        if not self._active:
            return
        keep_until(out / METRICS, done)
        self._file = (out / METRICS).open("a", buffering=1)
        self._board = TensorBoard(out, done) if tensorboard else None
        self._display = Display(done, steps)

    def logs(self, step: int) -> bool:
        """Whether a step gets a line in the log for its number; the same on all ranks."""
        return step in (self._done + 1, self._steps) or step % self._log_every == 0

    def step(self, record: Mapping[str, Any]) -> None:
        """One step's record."""
        if not self._active:
            return
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        with naming(self._file.name):
            self._file.write(json.dumps(plain) + "\n")
        if self._board is not None:
            self._board.step(record)
        self._display.step(record, self.logs(record["step"]) or "val_loss" in record)

    def close(self) -> None:
        """End the files and the bar."""
        if self._active:
            self._file.close()
            if self._board is not None:
                self._board.close()
            self._display.close()


def last_step(path: Path) -> int:
    """The step of the last whole record; 0 if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            tail = file.read()
    except OSError:
        return 0
    for text in reversed(tail.splitlines()):
        try:
            return int(json.loads(text)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0


def keep_until(path: Path, step: int) -> None:
    """Drop the records after `step`: a resumed run writes them again."""
    kept = []
    if path.exists():
        for text in path.read_text(errors="replace").splitlines():
            try:
                if json.loads(text)["step"] <= step:
                    kept.append(text + "\n")
            except (ValueError, KeyError, TypeError):
                continue  # a line cut off by a crash
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(kept))
    partial.replace(path)
