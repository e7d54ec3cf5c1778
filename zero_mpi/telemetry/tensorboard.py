"""`OUT/tensorboard`: the records of a run as TensorBoard's event files, through tensorboardX.

Its writer of files is used directly: its SummaryWriter puts each scalar through a queue between processes,
which costs more and loses what is in it when a job is killed. Each job of a run writes a file of its own and
begins it with the mark at which TensorBoard forgets what it has of the steps that come again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zero_mpi.errors import UsageError, naming

FOLDER = "tensorboard"
TAGS = ("loss", "val_loss", "lr", "grad_norm", "tokens_per_second", "mfu", "wait_seconds", "sent_bytes")
OF_RANKS = ("memory_bytes", "micro_batch_seconds")
MOST_RANKS = 16  # who have tags of their own; of more there is the largest figure only


def library() -> Any:
    """tensorboardX, its writer and its messages. Raises UsageError where it is not installed."""
    try:
        from tensorboardX import event_file_writer
        from tensorboardX.proto import event_pb2, summary_pb2
    except ImportError as error:
        raise UsageError(
            f"--tensorboard needs tensorboardX ({error}): pip install 'zero-mpi[tensorboard]'"
        ) from error
    return event_file_writer.EventsWriter, event_pb2, summary_pb2


class TensorBoard:
    """A job's file; steps after `done` in files of earlier jobs are forgotten. Raises OSError."""

    def __init__(self, out: Path, done: int) -> None:
        writer, self._events, self._summaries = library()
        self._folder = out / FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names, which begin with the time in seconds.
        suffix = f".{time.time_ns() % 10**9:09d}"
        self._writer = writer(str(self._folder / "events"), suffix)
        mark = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(self._events.Event(step=done + 1, session_log=mark))

    def step(self, record: Mapping[str, Any]) -> None:
        """The numbers of one step."""
        value = self._summaries.Summary.Value
        values = [value(tag=tag, simple_value=number) for tag, number in numbers(record)]
        self._write(self._events.Event(step=record["step"], summary=self._summaries.Summary(value=values)))

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        with naming(self._folder):
            self._writer.write_event(event)
            self._writer.flush()

    def close(self) -> None:
        """Close the file of this job."""
        self._writer.close()


def numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Tags and values of a record."""
    for tag in TAGS:
        if tag in record:
            yield tag, record[tag]
    for tag in OF_RANKS:
        figures = {rank: value for rank, value in enumerate(record.get(tag, [])) if value is not None}
        if figures:
            yield f"{tag}/largest", max(figures.values())
        for rank, value in figures.items() if len(figures) <= MOST_RANKS else []:
            yield f"{tag}/rank_{rank:02d}", value
