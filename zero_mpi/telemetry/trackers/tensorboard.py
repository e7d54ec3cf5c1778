"""`OUT/tensorboard`: the records of a run as TensorBoard's event files, through tensorboardX.

Its file writer is used directly: its SummaryWriter passes each scalar through a queue between processes,
which costs more and loses the queue's content when a job is killed. Each job of a run writes its own file and
begins it with the mark at which TensorBoard discards the steps that are repeated.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_mpi.errors import import_optional, naming
from zero_mpi.telemetry.trackers.tracker import TrackedJob, numbers

FOLDER = "tensorboard"
NEEDS = ("event_file_writer", "proto.event_pb2", "proto.summary_pb2")


def check(wish: bool) -> Any:
    """Return tensorboardX's writer and its messages. Raises UsageError where it is not installed."""
    return import_optional("--tensorboard", "tensorboard", *(f"tensorboardX.{name}" for name in NEEDS))


def begin(run: TrackedJob, wish: bool) -> TensorBoard:
    """Return the files of a job."""
    return TensorBoard(run.out, run.done)


class TensorBoard:
    """File of a job; steps after `done` in files of earlier jobs are discarded. Raises OSError."""

    def __init__(self, out: Path, done: int) -> None:
        writer, self._events, self._summaries = check(True)
        self._folder = out / FOLDER
        self._folder.mkdir(exist_ok=True)
        # TensorBoard reads files in the order of their names, which begin with the time in seconds.
        suffix = f".{time.time_ns() % 10**9:09d}"
        self._writer = writer.EventsWriter(str(self._folder / "events"), suffix)
        mark = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(self._events.Event(step=done + 1, session_log=mark))

    def step(self, record: Mapping[str, Any]) -> None:
        value = self._summaries.Summary.Value
        values = [value(tag=tag, simple_value=number) for tag, number in numbers(record)]
        self._write(self._events.Event(step=record["step"], summary=self._summaries.Summary(value=values)))

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        with naming(self._folder):
            self._writer.write_event(event)
            self._writer.flush()

    def close(self) -> None:
        with naming(self._folder):
            self._writer.close()
