"""Interface of trackers, and a wrapper that keeps a failing tracker from ending the run."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from zero_mpi.errors import JobError
from zero_mpi.files.foreign import one_line
from zero_mpi.telemetry import log

CLOSE_SECONDS = 60.0  # seconds that the end of a run waits for pending records


@dataclass(frozen=True)
class TrackedJob:
    """Job of a run: its folder, the steps that were done before it, and its settings."""

    out: Path
    done: int
    settings: Mapping[str, Any]


class Tracker(Protocol):
    """Receives the record of each step. An OSError ends the run, as an error of its own records does."""

    def step(self, record: Mapping[str, Any]) -> None:
        """Take the record of one step."""

    def close(self) -> None:
        """Close the tracker: the steps of this job are done."""


class Guarded:
    """Tracker whose failures are logged once and end nothing: a server, or the client of one.

    `begin` makes it, and may raise anything; that becomes a JobError, before the first step.
    """

    def __init__(self, flag: str, begin: Any) -> None:
        self._flag = flag
        try:
            self._tracker: Tracker | None = begin()
        except Exception as error:
            raise JobError(f"{flag}: {explained(error)}") from error

    def step(self, record: Mapping[str, Any]) -> None:
        """Pass a record on, as long as that has worked."""
        self._attempt(lambda tracker: tracker.step(record))

    def close(self) -> None:
        """Let the tracker send the rest, for a minute at most."""
        closing = threading.Thread(target=self._attempt, args=(lambda tracker: tracker.close(),), daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            log.warning(
                "%s: not all records were uploaded within %.0f s; the run folder is complete",
                self._flag,
                CLOSE_SECONDS,
            )

    def _attempt(self, act: Any) -> None:
        if self._tracker is None:
            return
        try:
            act(self._tracker)
        except Exception as error:
            self._tracker = None
            log.warning("%s: %s; the run continues without it", self._flag, explained(error))


def explained(error: Exception) -> str:
    """Return an exception of a library in one line."""
    return one_line(f"{type(error).__name__}: {error}")


TAGS = ("loss", "val_loss", "lr", "grad_norm", "tokens_per_second", "mfu", "wait_seconds", "sent_bytes")
OF_RANKS = ("memory_bytes", "micro_batch_seconds")
MOST_RANKS = 16  # most ranks with their own tags; beyond that only the largest figure is sent


def numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield tags and values of a record."""
    for tag in TAGS:
        if tag in record:
            yield tag, record[tag]
    for tag in OF_RANKS:
        figures = {rank: value for rank, value in enumerate(record.get(tag, [])) if value is not None}
        if figures:
            yield f"{tag}/largest", max(figures.values())
        for rank, value in figures.items() if len(figures) <= MOST_RANKS else []:
            yield f"{tag}/rank_{rank:02d}", value
