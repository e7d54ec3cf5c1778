"""A run folder as the report sees it: records, events, state, configuration, checkpoints.

Only `metrics.jsonl` or `status.json` must be there. All else may be missing, of an older version, cut off by
a crash or written by somebody else; what cannot be read is left out, and a checkpoint says why. Values of
other types than expected count as missing.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zero_mpi.checkpoint import folders
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.sound import ID, STATE_DIGEST
from zero_mpi.config.toml import MOST_SETTINGS
from zero_mpi.errors import FileError, UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.files.gguf_keys import GGUFKeys
from zero_mpi.files.open import exists, read_file, read_lines
from zero_mpi.files.parse import parse_json, parse_toml
from zero_mpi.report.columns import LIMIT, Metrics, is_number, read_metrics
from zero_mpi.telemetry.metrics import METRICS
from zero_mpi.telemetry.status import NAME as STATUS
from zero_mpi.telemetry.status import RUNNING, read_status

EVENTS, CONFIG = "events.jsonl", "config.toml"
LOST = "lost"  # a run that says "running" and was not heard of for SILENCE
MOST_KEYS = 500  # settings
MOST_HISTORY = 8 << 20  # bytes of the newest events, which are those that are kept
SILENCE = 60.0  # seconds; a living run renews its status every five

MOST_COUNT = 1 << 63
Event = Mapping[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """What is in a checkpoint folder, by the headers of its files; `problem`: why they cannot be read."""

    folder: str
    step: int
    nbytes: int = 0
    digest: str = ""
    id: str = ""
    parameters: int = 0
    architecture: str = ""
    is_latest: bool = False
    is_best: bool = False
    problem: str = ""


@dataclass
class Run:
    """All that is known of a run."""

    path: Path
    metrics: Metrics
    status: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[Event] = ()
    checkpoints: Sequence[Checkpoint] = ()
    name: str = ""
    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def state(self) -> str:
        """Its state as status.json says, LOST if it should be alive and is not, "" if nobody said."""
        said = text(self.status.get("state"))
        if said == RUNNING and (self.silence or 0.0) > SILENCE:
            return LOST
        return said

    @property
    def silence(self) -> float | None:
        """Seconds since its status was written."""
        written = moment(self.status.get("updated"))
        return None if written is None else (self.now - written).total_seconds()

    @property
    def step(self) -> int:
        """Steps done: of the records, which a resume cuts, or of the status where there are none."""
        if self.metrics.records:
            return int(self.metrics.at["step"].extent[1])
        return integer(self.status.get("step")) or 0

    @property
    def steps(self) -> int | None:
        """Steps that the run should do."""
        return integer(self.status.get("steps")) or integer(self.config.get("steps"))

    @property
    def memory(self) -> Sequence[float]:
        """Of the latest job's ranks, when it was last looked at; what an earlier job had is not its own."""
        started = self.latest("started")
        ranks = integer(started.get("ranks")) or integer(self.status.get("ranks"))
        values, since = self.metrics.memory, integer(started.get("step")) or 0
        is_its_own = self.metrics.memory_step > since and ranks in (None, len(values))
        return values if is_its_own else ()

    def latest(self, event: str) -> Event:
        """The last event of a name; empty if there was none."""
        return next((found for found in reversed(self.events) if found["event"] == event), {})


def text(value: Any) -> str:
    """A value that should be a text."""
    return value if isinstance(value, str) else ""


def integer(value: Any) -> int | None:
    """A value that should be a count."""
    return int(value) if is_number(value) and 0 <= value <= MOST_COUNT else None


def moment(value: Any) -> datetime | None:
    """A value that should be a time in ISO 8601; UTC where it names no zone."""
    try:
        found = datetime.fromisoformat(text(value))
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def read_runs(paths: Sequence[Path], limit: int = LIMIT) -> list[Run]:
    """The runs of some folders, each once, with names that tell them apart. UsageError for another folder."""
    places: dict[str, Path] = {}
    for path in paths:
        places.setdefault(os.path.realpath(path), path)
    runs = [read_run(path, limit) for path in places.values()]
    for run, name in zip(runs, names([run.path for run in runs]), strict=True):
        run.name = name
    return runs


def names(paths: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as it takes to tell them apart."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    for length in range(1, max(map(len, parts), default=0) + 1):
        found = ["/".join(one[-length:]) for one in parts]
        if len(set(found)) == len(found):
            return found
    return [str(path) for path in paths]


def read_run(path: Path, limit: int = LIMIT) -> Run:
    """The run in a folder; raises UsageError if there is none, or if it may not be read."""
    check_folder(path)
    try:
        metrics = read_metrics(path / METRICS, limit) if os.path.exists(path / METRICS) else Metrics(limit)
        return Run(
            path,
            metrics,
            status=read_status(path / STATUS),
            config=read_config(path / CONFIG),
            events=read_events(path / EVENTS),
            checkpoints=list(read_checkpoints(path)),
        )
    except OSError as error:
        raise UsageError(
            f"{shown(error.filename or path)}: cannot be read: {error.strerror or error}; "
            "the folder of a run must be readable"
        ) from error


def check_folder(path: Path) -> None:
    """Raise UsageError if `path` is not the folder of a run."""
    wanted = f"expected the folder of a run (what --out named), which holds {METRICS} or {STATUS}"
    if not exists(path):
        raise UsageError(f"{shown(path)}: {wanted}; found nothing there: give the path of a run")
    if not os.path.isdir(path):
        raise UsageError(f"{shown(path)}: {wanted}; found a file: give its folder")
    if any(os.path.exists(path / name) for name in (METRICS, STATUS)):
        return
    if os.path.exists(folders.weights_in(path)):
        above = Path(os.path.realpath(path)).parent
        raise UsageError(f"{shown(path)}: {wanted}; found a checkpoint: give the folder around it, {above}")
    raise UsageError(f"{shown(path)}: {wanted}; found neither: give the path of a run")


def read_config(path: Path) -> dict[str, Any]:
    """The settings of a run; empty if they cannot be read."""
    try:
        found = parse_toml(read_file(path, MOST_SETTINGS))
    except ValueError:  # FileError is one
        return {}
    return dict(list(found.items())[:MOST_KEYS])


def read_events(path: Path) -> list[Event]:
    """The newest events of a run, oldest first; a line that is none is left out."""
    found, size = deque[tuple[int, Event]](), 0
    try:
        for line in read_lines(path, b'"event"'):
            event = event_of(line)
            if event:
                found.append((len(line), event))
                size += len(line)
            while size > MOST_HISTORY:
                size -= found.popleft()[0]
    except FileError:
        pass
    return [event for _, event in found]


def event_of(line: bytes) -> Event:
    """An event; empty for a line that is none."""
    try:
        found = parse_json(line, null_for_infinite=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) and text(found.get("event")) else {}


def read_checkpoints(out: Path) -> Iterator[Checkpoint]:
    """The checkpoints of a run, oldest first."""
    latest, best = (os.path.realpath(out / link) for link in (folders.LATEST, folders.BEST))
    for step, folder in folders.steps(out):
        place = os.path.realpath(folder)
        links: dict[str, Any] = {"is_latest": place == latest, "is_best": place == best}
        try:
            yield replace(read_checkpoint(folder, step), **links)
        except (UsageError, OSError) as error:
            problem = str(error).replace(f"{folder}{os.sep}", "")
            yield Checkpoint(folder.name, step, problem=problem, **links)


def read_checkpoint(folder: Path, step: int) -> Checkpoint:
    """What the headers of a checkpoint's files say; UsageError or OSError where they cannot be read."""
    model, state = GGUFFile.open(folders.weights_in(folder)), GGUFFile.open(folder / folders.OPTIMIZER)
    keys, own = (GGUFKeys(file.metadata, str(file.path)) for file in (state, model))
    return Checkpoint(
        folder.name,
        step,
        nbytes=sum(path.stat().st_size for path in folder.glob("*.gguf")),
        digest=keys.text(STATE_DIGEST) or "",
        id=keys.text(ID) or "",
        parameters=sum(spec.size for spec in model.tensors.values()),
        architecture=own.architecture or "",
        problem="" if keys.text(ID) == own.text(ID) else "its two files are of two checkpoints",
    )
