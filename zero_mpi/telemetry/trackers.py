"""Trackers, which send the numbers of a run's records to other programs.

A tracker gets the record of each step and sends every number in it (`numbers`). `TABLE` maps settings to
trackers; `wish` is the setting's value. `check` raises UsageError if the tracker cannot work here. In W&B and
MLflow each job is a separate run, because they cannot discard steps that a resumed job repeats.
"""

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from zero_mpi.errors import JobError, UsageError, import_optional, naming
from zero_mpi.files.foreign import one_line, shown
from zero_mpi.telemetry import log

MOST_RANKS = 16  # maximum number of ranks with separate tags; for more ranks, only the largest value is sent
CLOSE_SECONDS = 60.0  # maximum seconds that the end of a run waits for pending records
EVERY_SECONDS = 1.0  # seconds between writes of Prometheus' file and between requests to MLflow
LONGEST = 500  # maximum number of characters of a parameter's value in MLflow
PREFIX = "zero_mpi_"
RANK = re.compile(r"(?P<name>.+)/rank_(?P<rank>\d+)")


@dataclass(frozen=True)
class TrackedJob:
    """Job of a run: its folder, the number of steps done before it, and its settings."""

    out: Path
    steps_before: int
    settings: Mapping[str, Any]


class Tracker(Protocol):
    """Receiver of the record of each step. An OSError ends the run, as for metrics.jsonl."""

    def step(self, record: Mapping[str, Any]) -> None:
        """Send the record of one step."""

    def close(self) -> None:
        """Close the tracker after the last step of this job."""


def is_number(value: object) -> bool:
    """Return True if a value is a number; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (tag, value) of all numbers in a record except the step; a list has one number per rank."""
    for tag, value in record.items():
        if isinstance(value, list):
            figures = {rank: figure for rank, figure in enumerate(value) if is_number(figure)}
            if figures:
                yield f"{tag}/largest", max(figures.values())
            for rank, figure in figures.items() if len(figures) <= MOST_RANKS else ():
                yield f"{tag}/rank_{rank:02d}", figure
        elif isinstance(value, Mapping):
            for name, figure in value.items():
                if is_number(figure):
                    yield f"{tag}/{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}", figure
        elif is_number(value) and tag != "step":
            yield tag, value


class Guarded:
    """Tracker whose failures, such as server errors, are logged once and do not end the run.

    `begin` makes the tracker before the first step; an exception in `begin` becomes a JobError.
    """

    def __init__(self, flag: str, begin: Callable[[], Tracker]) -> None:
        self._flag = flag
        try:
            self._tracker: Tracker | None = begin()
        except Exception as error:
            raise JobError(f"{flag}: {explanation(error)}") from error

    def step(self, record: Mapping[str, Any]) -> None:
        self._attempt(lambda tracker: tracker.step(record))

    def close(self) -> None:
        """Wait until the tracker has sent all records, for CLOSE_SECONDS at most."""
        closing = threading.Thread(target=self._attempt, args=(lambda tracker: tracker.close(),), daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            log.warning(
                "%s: not all records were uploaded within %.0f s; the run folder is complete",
                self._flag,
                CLOSE_SECONDS,
            )

    def _attempt(self, act: Callable[[Tracker], None]) -> None:
        if self._tracker is None:
            return
        try:
            act(self._tracker)
        except Exception as error:
            self._tracker = None
            log.warning("%s: %s; the run continues without it", self._flag, explanation(error))


def explanation(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}")


class TensorBoard:
    """`--tensorboard`: TensorBoard's event files in `OUT/tensorboard`, through tensorboardX. Raises OSError.

    The library's file writer is used directly, because its SummaryWriter passes each scalar through a queue
    between processes, which is slower and loses data when a job is killed. Each job writes a new file; its
    first event makes TensorBoard discard the steps that are repeated.
    """

    def __init__(self, job: TrackedJob, wish: bool) -> None:
        writer, self._events, self._summaries = self.check(wish)
        self._folder = job.out / "tensorboard"
        self._folder.mkdir(exist_ok=True)
        # TensorBoard reads files in the order of their names, which contain the time in seconds.
        self._writer = writer.EventsWriter(str(self._folder / "events"), f".{time.time_ns() % 10**9:09d}")
        mark = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(self._events.Event(step=job.steps_before + 1, session_log=mark))

    @staticmethod
    def check(wish: bool) -> Any:
        modules = ("event_file_writer", "proto.event_pb2", "proto.summary_pb2")
        return import_optional("--tensorboard", "tensorboard", *(f"tensorboardX.{name}" for name in modules))

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


class Prometheus:
    """`--prometheus FOLDER`: writer of the newest record to a file for node_exporter's textfile collector.

    A rename replaces the file, at most once per second, so a scrape never reads an incomplete file. The file
    name and the label `run` identify the run folder.
    """

    def __init__(self, job: TrackedJob, wish: str) -> None:
        self._client, self._run = self.check(wish), os.path.abspath(job.out)
        digest = hashlib.sha256(os.fsencode(self._run)).hexdigest()[:8]
        self.path = Path(wish) / f"{PREFIX}{re.sub(r'[^A-Za-z0-9]+', '_', job.out.name)}_{digest}.prom"
        self._write_time, self._record = 0.0, dict[str, Any]()

    @staticmethod
    def check(wish: str) -> Any:
        if not os.path.isdir(wish):
            folder = shown(Path(wish))
            raise UsageError(f"--prometheus: {folder}: expected the folder of the textfile collector")
        return import_optional("--prometheus", "prometheus", "prometheus_client")

    def step(self, record: Mapping[str, Any]) -> None:
        """Write a record, at most once per second; numbers that the record lacks keep their last values."""
        self._record |= record
        if time.monotonic() - self._write_time >= EVERY_SECONDS:
            self._write(running=1)
            self._write_time = time.monotonic()

    def close(self) -> None:
        self._write(running=0)

    def _write(self, running: int) -> None:
        registry, gauges = self._client.CollectorRegistry(), dict[str, Any]()
        run = self._run.encode(errors="replace").decode()
        figures = [("step", self._record.get("step", 0)), *numbers(self._record), ("running", running)]
        for tag, value in figures:
            of_rank = RANK.fullmatch(tag)
            labels = {"run": run} | ({"rank": str(int(of_rank["rank"]))} if of_rank else {})
            name = PREFIX + re.sub(r"\W", "_", of_rank["name"] if of_rank else tag, flags=re.ASCII)
            if name not in gauges:
                text = f"{tag} in the newest record of the run"
                gauges[name] = self._client.Gauge(name, text, list(labels), registry=registry)
            gauges[name].labels(**labels).set(value)
        self._client.write_to_textfile(str(self.path), registry)


class WandB:
    """`--wandb PROJECT`: sender to a W&B run of this project, in a group with the name of OUT.

    With WANDB_MODE=offline the run is a folder below OUT. The library sends records from a separate
    process, so no step waits for a network.
    """

    def __init__(self, job: TrackedJob, wish: str) -> None:
        wandb = self.check(wish)
        # W&B need not capture terminal output or system metrics, because the records have all numbers.
        settings = wandb.Settings(console="off", silent=True, x_disable_stats=True)
        self._run = wandb.init(
            project=wish,
            group=job.out.name,
            name=f"{job.out.name} from step {job.steps_before}",
            dir=str(job.out),
            config=dict(job.settings),
            settings=settings,
        )

    @staticmethod
    def check(wish: str) -> Any:
        return import_optional("--wandb", "wandb", "wandb")

    def step(self, record: Mapping[str, Any]) -> None:
        self._run.log(dict(numbers(record)), step=record["step"])

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """`--mlflow EXPERIMENT`: sender to an MLflow run with the tag `zero_mpi.run`, at MLFLOW_TRACKING_URI.

    A thread sends the records, at most once per second, so no step waits for a server. With the library's own
    thread, the process could not end while a server hangs.
    """

    def __init__(self, job: TrackedJob, wish: str) -> None:
        self._entities, tracking = self.check(wish)
        self._client = tracking.MlflowClient()
        experiment = self._client.get_experiment_by_name(wish)
        number = experiment.experiment_id if experiment else self._client.create_experiment(wish)
        tags = {"zero_mpi.run": os.path.abspath(job.out), "zero_mpi.from_step": str(job.steps_before)}
        run = self._client.create_run(number, run_name=job.out.name, tags=tags)
        self._id, self._metrics, self._batch_time = run.info.run_id, list[Any](), 0.0
        self._queue: SimpleQueue[list[Any]] = SimpleQueue()
        self._failure: Exception | None = None
        self._sender = threading.Thread(target=self._send, name="zero_mpi mlflow", daemon=True)
        self._sender.start()
        params = [self._entities.Param(key, str(value)[:LONGEST]) for key, value in job.settings.items()]
        self._client.log_batch(self._id, params=params)  # the library splits the batch into requests

    @staticmethod
    def check(wish: str) -> Any:
        return import_optional("--mlflow", "mlflow", "mlflow.entities", "mlflow.tracking")

    def step(self, record: Mapping[str, Any]) -> None:
        if self._failure is not None:
            raise self._failure
        now, metric = int(time.time() * 1000), self._entities.Metric
        self._metrics += [metric(tag, value, now, record["step"]) for tag, value in numbers(record)]
        if time.monotonic() - self._batch_time >= EVERY_SECONDS:
            self._hand_over()

    def _hand_over(self) -> None:
        if self._metrics:
            self._queue.put(self._metrics)
        self._metrics, self._batch_time = [], time.monotonic()

    def _send(self) -> None:
        try:
            while metrics := self._queue.get():
                self._client.log_batch(self._id, metrics=metrics)
        except Exception as error:  # the main thread reports it at its next step
            self._failure = error

    def close(self) -> None:
        self._hand_over()
        self._queue.put([])
        self._sender.join()
        if self._failure is not None:
            raise self._failure
        self._client.set_terminated(self._id)


TABLE: Mapping[str, Any] = {
    "tensorboard": TensorBoard,
    "prometheus": Prometheus,
    "wandb": WandB,
    "mlflow": MLflow,
}


def check(config: object) -> None:
    """Raise UsageError if a tracker in the settings cannot work here."""
    for name, kind in TABLE.items():
        if wish := getattr(config, name):
            kind.check(wish)


def begin(config: object, job: TrackedJob) -> list[Tracker]:
    """Start and return the trackers of a job. Raise JobError or OSError if a tracker cannot start."""
    trackers = list[Tracker]()
    for name, kind in TABLE.items():
        if wish := getattr(config, name):
            start = partial(kind, job, wish)
            trackers.append(start() if kind is TensorBoard else Guarded(f"--{name}", start))
    return trackers
