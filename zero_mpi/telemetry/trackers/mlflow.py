"""`--mlflow EXPERIMENT`: the records of a run in MLflow, at MLFLOW_TRACKING_URI.

Each job of a run is a separate run there, and all share the tag `zero_mpi.run`. Records are
handed over once per second at most, and sent by a thread, so no step waits for a server.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any

from zero_mpi.errors import import_optional
from zero_mpi.telemetry.trackers.tracker import Guarded, TrackedJob, numbers

EVERY_SECONDS = 1.0
MOST_METRICS, MOST_PARAMS, LONGEST = 1000, 100, 500  # limits of a request; letters of a value


def check(wish: str) -> Any:
    """Return the library's entities and its client. Raises UsageError where it is not installed."""
    return import_optional("--mlflow", "mlflow", "mlflow.entities", "mlflow.tracking")


def begin(run: TrackedJob, wish: str) -> Guarded:
    """Return the run of a job in the experiment `wish`."""
    return Guarded("--mlflow", lambda: Experiment(run, wish))


class Experiment:
    """MLflow run in an experiment. Raises the errors of the library."""

    def __init__(self, run: TrackedJob, name: str) -> None:
        self._entities, tracking = check(name)
        self._client = tracking.MlflowClient()
        known = self._client.get_experiment_by_name(name)
        number = known.experiment_id if known else self._client.create_experiment(name)
        tags = {"zero_mpi.run": os.path.abspath(run.out), "zero_mpi.from_step": str(run.done)}
        made = self._client.create_run(number, run_name=run.out.name, tags=tags)
        self._id, self._metrics, self._handed_over = made.info.run_id, list[Any](), 0.0
        self._queue: SimpleQueue[list[Any]] = SimpleQueue()
        self._failure: Exception | None = None
        self._sender = threading.Thread(target=self._send, name="zero_mpi mlflow", daemon=True)
        self._sender.start()
        said = [self._entities.Param(key, str(value)[:LONGEST]) for key, value in run.settings.items()]
        for first in range(0, len(said), MOST_PARAMS):
            self._client.log_batch(self._id, params=said[first : first + MOST_PARAMS])

    def step(self, record: Mapping[str, Any]) -> None:
        """Keep the numbers of one step, and hand over the collected ones once per second."""
        if self._failure is not None:
            raise self._failure
        now = int(time.time() * 1000)
        self._metrics += [
            self._entities.Metric(tag, value, now, record["step"]) for tag, value in numbers(record)
        ]
        if time.monotonic() - self._handed_over >= EVERY_SECONDS:
            self._hand_over()

    def _hand_over(self) -> None:
        if self._metrics:
            self._queue.put(self._metrics)
        self._metrics, self._handed_over = [], time.monotonic()

    def _send(self) -> None:
        try:
            while metrics := self._queue.get():
                for first in range(0, len(metrics), MOST_METRICS):
                    self._client.log_batch(self._id, metrics=metrics[first : first + MOST_METRICS])
        except Exception as error:  # reported by the thread of the run, at its next step
            self._failure = error

    def close(self) -> None:
        """End the run there, after all numbers were taken."""
        self._hand_over()
        self._queue.put([])
        self._sender.join()
        if self._failure is not None:
            raise self._failure
        self._client.set_terminated(self._id)
