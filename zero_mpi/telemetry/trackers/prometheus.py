"""`--prometheus FOLDER`: the newest record in a file for node_exporter's textfile collector.

The file is replaced by a rename, once per second at most, so a scrape never sees half of it and a fast run
writes no more than a slow one. Its name contains the folder of the run, as does the label `run`.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zero_mpi.errors import UsageError, import_optional
from zero_mpi.files.foreign import shown
from zero_mpi.telemetry.trackers.tracker import Guarded, TrackedJob, numbers

EVERY_SECONDS = 1.0
PREFIX = "zero_mpi_"
RANK = re.compile(r"(?P<name>\w+)/rank_(?P<rank>\d+)")


def check(wish: str) -> Any:
    """Return prometheus_client. Raises UsageError where it is missing, or the folder."""
    if not os.path.isdir(wish):
        raise UsageError(f"--prometheus: {shown(Path(wish))}: expected the folder of the textfile collector")
    return import_optional("--prometheus", "prometheus", "prometheus_client")


def begin(run: TrackedJob, wish: str) -> Guarded:
    """Return the file of a job."""
    return Guarded("--prometheus", lambda: TextFile(Path(wish), run.out))


class TextFile:
    """File of a run in `folder`. Raises OSError."""

    def __init__(self, folder: Path, out: Path) -> None:
        self._client, self._run = check(str(folder)), os.path.abspath(out)
        digest = hashlib.sha256(os.fsencode(self._run)).hexdigest()[:8]
        self.path = folder / f"{PREFIX}{re.sub(r'[^A-Za-z0-9]+', '_', out.name)}_{digest}.prom"
        self._written, self._record = 0.0, dict[str, Any]()

    def step(self, record: Mapping[str, Any]) -> None:
        """Write a record, unless one was written a moment ago; numbers that it lacks stay as they were."""
        self._record |= record
        if time.monotonic() - self._written >= EVERY_SECONDS:
            self._write(running=1)
            self._written = time.monotonic()

    def close(self) -> None:
        """Write the last record, and that the run is no longer running."""
        self._write(running=0)

    def _write(self, running: int) -> None:
        registry, gauges = self._client.CollectorRegistry(), dict[str, Any]()
        for name, rank, value in [*samples(self._record), ("running", None, running)]:
            labels = ["run"] if rank is None else ["run", "rank"]
            if name not in gauges:
                gauges[name] = self._client.Gauge(
                    PREFIX + name, HELP.get(name, name), labels, registry=registry
                )
            run = self._run.encode(errors="replace").decode()
            gauges[name].labels(run, *([] if rank is None else [rank])).set(value)
        self._client.write_to_textfile(str(self.path), registry)


HELP = {
    "step": "completed optimizer steps",
    "tokens": "target tokens in the loss so far",
    "skipped": "steps skipped because of a gradient that was not finite",
    "loss": "training loss of the newest step, in nats per token",
    "val_loss": "validation loss of the newest evaluation, in nats per token",
    "lr": "learning rate",
    "grad_norm": "norm of the gradient before clipping",
    "tokens_per_second": "training speed of all ranks, in tokens per second",
    "mfu": "model FLOP/s as a share of the measured peak, 0 to 1",
    "wait_seconds": "time that rank 0 waited for other ranks in the newest step, in seconds",
    "sent_bytes": "bytes that rank 0 sent in the newest step",
    "memory_bytes": "resident memory of one rank, in bytes",
    "memory_bytes_largest": "resident memory of the largest rank, in bytes",
    "micro_batch_seconds": "compute time of one rank per micro-batch, in seconds",
    "micro_batch_seconds_largest": "compute time of the slowest rank per micro-batch, in seconds",
    "running": "1 while the run goes on, 0 after its last step",
}


def samples(record: Mapping[str, Any]) -> Iterator[tuple[str, str | None, float]]:
    """Yield names, ranks (None: of the run) and values of a record."""
    for name in ("step", "tokens", "skipped"):
        if name in record:
            yield name, None, record[name]
    for tag, value in numbers(record):
        of_rank = RANK.fullmatch(tag)
        if of_rank:
            yield of_rank["name"], str(int(of_rank["rank"])), value
        else:
            yield tag.replace("/", "_"), None, value
