"""Reads run folders for the report: records, events, state and configuration.

A run folder must have `metrics.jsonl` or `status.json`. Anything else may be missing, written by an older
version, cut off by a crash, or from an untrusted source. Files and values that cannot be read are left out.
"""

import math
import os
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from zero_mpi.checkpoint import folders
from zero_mpi.config.toml import CONFIG_FILE as CONFIG
from zero_mpi.config.toml import MOST_SETTINGS
from zero_mpi.errors import FileError, UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import exists, read_file, read_lines
from zero_mpi.files.parse import parse_json, parse_toml
from zero_mpi.telemetry.events import NAME as EVENTS
from zero_mpi.telemetry.metrics import MARK, METRICS, record_of
from zero_mpi.telemetry.status import NAME as STATUS
from zero_mpi.telemetry.status import RUNNING, read_status

LIMIT = 2000  # maximum number of columns of a run's curves
LARGEST = 1e39  # above the largest float32; larger numbers count as not finite
MEMORY = "memory_bytes"  # list with a number for each rank; the curve shows the largest
NUMBERS: tuple[str, ...] = ("loss", "val_loss", "lr", "grad_norm", "tokens_per_second", "mfu")
NUMBERS += ("step_seconds", "wait_seconds", MEMORY, "balance_loss", "z_loss")
NUMBERS += ("load_most", "load_least", "load_entropy")
LOST = "lost"  # state of a "running" run that has not renewed its status for SILENCE
SILENCE = 60.0  # seconds; a run that is alive renews its status every five seconds
MOST_KEYS = 500  # maximum number of settings that the page shows
MOST_HISTORY = 8 << 20  # maximum bytes of events to keep; older events are dropped
MOST_COUNT = 1 << 63


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def number_of(record: Mapping[str, Any], name: str) -> float:
    """Return a number of a record: nan if it is not finite or not a number, infinity if it is missing."""
    value = record.get(name, math.inf)
    if name == MEMORY and isinstance(value, list) and value and all(map(is_number, value)):
        return float(max(value))
    return float(value) if is_number(value) or value is math.inf else math.nan


class Curves:
    """Curves of a run. If it has more than `limit` steps, neighbouring steps are averaged.

    width   number of steps in a column, a power of two; column i has steps i * width + 1 to (i + 1) * width
    names   names of the numbers that the records have
    """

    def __init__(self, records: Iterable[Mapping[str, Any]] = (), limit: int = LIMIT) -> None:
        steps, values = array("q"), {name: array("d") for name in NUMBERS}
        for record in records:
            steps.append(record["step"])
            for name in NUMBERS:
                values[name].append(number_of(record, name))
        self.step, self.width = max(steps, default=0), 1
        while self.step > self.width * limit:
            self.width *= 2
        self._columns = (np.array(steps, np.int64) - 1) // self.width
        self._values = {name: np.array(series) for name, series in values.items()}
        self.names = {name for name, series in self._values.items() if not np.isinf(series).all()}

    def points(self, name: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return (last step, mean) of each column that has this number; the mean is nan if any value is."""
        values = self._values[name]
        mask = ~np.isinf(values)
        columns, places = np.unique(self._columns[mask], return_inverse=True)
        means = np.bincount(places, values[mask]) / np.bincount(places)
        return np.minimum((columns + 1) * self.width, self.step), means


class Entry(dict[str, Any]):
    """Values in a file, by name. A value of an unexpected type counts as missing."""

    def text(self, name: str) -> str:
        value = self.get(name)
        return value if isinstance(value, str) else ""

    def count(self, name: str) -> int | None:
        """Return a number of at least 0 as an integer, else None."""
        value = self.get(name)
        return int(value) if is_number(value) and 0 <= value <= MOST_COUNT else None

    def moment(self, name: str) -> datetime | None:
        """Return a time in ISO 8601 as a datetime, or None. Without a time zone, the time is UTC."""
        try:
            moment = datetime.fromisoformat(self.text(name))
        except ValueError:
            return None
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


@dataclass
class Run:
    """Data that a run folder has for the report."""

    path: Path
    curves: Curves
    status: Entry = field(default_factory=Entry)
    config: Entry = field(default_factory=Entry)
    events: Sequence[Entry] = ()
    name: str = ""
    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def state(self) -> str:
        """State in status.json: LOST if a running run was silent for too long, "" without this file."""
        state, updated = self.status.text("state"), self.status.moment("updated")
        is_silent = updated is not None and (self.now - updated).total_seconds() > SILENCE
        return LOST if state == RUNNING and is_silent else state

    @property
    def step(self) -> int:
        """Number of the last step, from the records, or from the status if there are no records."""
        return self.curves.step or self.status.count("step") or 0

    @property
    def started(self) -> Entry:
        return next((event for event in reversed(self.events) if event["event"] == "started"), Entry())


def read_runs(paths: Sequence[Path], limit: int = LIMIT) -> list[Run]:
    """Return the runs in folders, each run once, with unique names. Raise UsageError for other folders.

    Names are the last n parts of the paths, with the smallest n that makes all names unique.
    """
    places: dict[str, Path] = {}
    for path in paths:
        places.setdefault(os.path.realpath(path), path)
    runs = [read_run(path, limit) for path in places.values()]
    parts, length, names = [Path(os.path.abspath(run.path)).parts for run in runs], 0, list[str]()
    while len(set(names)) < len(runs) and length <= max(map(len, parts)):
        length += 1
        names = ["/".join(part[-length:]) for part in parts]
    for run, name in zip(runs, names, strict=True):
        run.name = name
    return runs


def read_run(path: Path, limit: int = LIMIT) -> Run:
    """Return the run in a folder. Raise UsageError if there is none, or if it cannot be read."""
    check_folder(path)
    try:
        has_records = os.path.exists(path / METRICS)
        lines = read_lines(path / METRICS, MARK, "a file of records") if has_records else ()
        curves = Curves(filter(None, map(record_of, lines)), limit)  # lines that a crash cut off are left out
        config = Entry()
        with suppress(ValueError):  # includes FileError
            config = Entry(islice(parse_toml(read_file(path / CONFIG, MOST_SETTINGS)).items(), MOST_KEYS))
        return Run(path, curves, Entry(read_status(path / STATUS)), config, read_events(path / EVENTS))
    except OSError as error:
        place = shown(error.filename or path)
        raise UsageError(f"{place}: cannot be read: {error.strerror or error}") from error


def check_folder(path: Path) -> None:
    """Raise UsageError if `path` is not the folder of a run."""
    if any(os.path.exists(path / name) for name in (METRICS, STATUS)):
        return
    finding = "neither: use the path of a run"
    if not exists(path):
        finding = "nothing: use the path of a run"
    elif not os.path.isdir(path):
        finding = "a file: use its folder"
    elif os.path.exists(folders.weights_in(path)):
        finding = f"a checkpoint: use the run folder, {Path(os.path.realpath(path)).parent}"
    message = f"expected a run folder (--out of training) with {METRICS} or {STATUS}"
    raise UsageError(f"{shown(path)}: {message}; found {finding}")


def read_events(path: Path) -> list[Entry]:
    """Return the newest events of a run in order of time. Invalid lines are left out."""
    events, size = deque[tuple[int, Entry]](), 0
    with suppress(FileError):
        for line in read_lines(path, b'"event"'):
            with suppress(ValueError):
                event = parse_json(line, null_for_infinite=True)
                if isinstance(event, dict) and Entry(event).text("event"):
                    events.append((len(line), Entry(event)))
                    size += len(line)
            while size > MOST_HISTORY:
                size -= events.popleft()[0]
    return [event for _, event in events]
