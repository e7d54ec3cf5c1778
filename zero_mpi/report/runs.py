"""A run folder as the report sees it: records, events, state, configuration, checkpoints.

Only `metrics.jsonl` or `status.json` must be there. All else may be missing, of an older version, cut off by
a crash or written by somebody else; what cannot be read is left out, and a checkpoint says why.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from zero_mpi.checkpoint import folders
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.sound import ID, STATE_DIGEST, keys_of
from zero_mpi.config.replay import NAME as CONFIG
from zero_mpi.config.toml import MOST_SETTINGS
from zero_mpi.errors import FileError, UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import exists, read_file, read_lines
from zero_mpi.files.parse import parse_json, parse_toml
from zero_mpi.report.columns import LIMIT, Metrics, is_number, read_metrics
from zero_mpi.telemetry.events import NAME as EVENTS
from zero_mpi.telemetry.metrics import METRICS
from zero_mpi.telemetry.status import NAME as STATUS
from zero_mpi.telemetry.status import RUNNING, read_status

LOST = "lost"  # a run that says "running" and was not heard of for SILENCE
MOST_KEYS = 500  # settings
MOST_HISTORY = 8 << 20  # bytes of the newest events, which are those that are kept
SILENCE = 60.0  # seconds; a living run renews its status every five
MOST_COUNT = 1 << 63


class Said(dict[str, Any]):
    """What a file says, by name. A value of another type than it is asked for counts as missing."""

    def text(self, name: str) -> str:
        """A text, or nothing."""
        value = self.get(name)
        return value if isinstance(value, str) else ""

    def count(self, name: str) -> int | None:
        """A whole number from 0 on."""
        value = self.get(name)
        return int(value) if is_number(value) and 0 <= value <= MOST_COUNT else None

    def seconds(self, name: str) -> float | None:
        """A time that something took."""
        value = self.get(name)
        return float(value) if is_number(value) and value >= 0 else None

    def moment(self, name: str) -> datetime | None:
        """A time in ISO 8601; UTC where it names no zone."""
        try:
            found = datetime.fromisoformat(self.text(name))
        except ValueError:
            return None
        return found if found.tzinfo else found.replace(tzinfo=UTC)


@dataclass(frozen=True)
class Checkpoint:
    """What is in a checkpoint folder, by the headers of its files; `problem`: why they cannot be read."""

    folder: str
    step: int
    nbytes: int = 0
    digest: str = ""
    parameters: int = 0
    architecture: str = ""
    is_latest: bool = False
    is_best: bool = False
    problem: str = ""


@dataclass
class Run:
    """All that is known of a run; `number`: its place in the report, `is_alone`: there is no other in it."""

    path: Path
    metrics: Metrics
    status: Said = field(default_factory=Said)
    config: Said = field(default_factory=Said)
    events: Sequence[Said] = ()
    checkpoints: Sequence[Checkpoint] = ()
    name: str = ""
    number: int = 0
    is_alone: bool = True
    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def state(self) -> str:
        """Its state as status.json says, LOST if it should be alive and is not, "" if nobody said."""
        said = self.status.text("state")
        return LOST if said == RUNNING and (self.silence or 0.0) > SILENCE else said

    @property
    def silence(self) -> float | None:
        """Seconds since its status was written."""
        written = self.status.moment("updated")
        return None if written is None else (self.now - written).total_seconds()

    @property
    def step(self) -> int:
        """Steps done: of the records, which a resume cuts, or of the status where there are none."""
        if self.metrics.records:
            return int(self.metrics.at["step"].extent[1])
        return self.status.count("step") or 0

    @property
    def steps(self) -> int | None:
        """Steps that the run should do."""
        return self.status.count("steps") or self.config.count("steps")

    @property
    def ranks(self) -> int | None:
        """How many the latest job has."""
        return self.latest("started").count("ranks") or self.status.count("ranks")

    @property
    def memory(self) -> Sequence[float]:
        """Of the latest job's ranks, when it was last looked at; what an earlier job had is not its own."""
        values, since = self.metrics.memory, self.latest("started").count("step") or 0
        is_its_own = self.metrics.memory_step > since and (self.ranks or len(values)) == len(values)
        return values if is_its_own else ()

    def latest(self, event: str) -> Said:
        """The last event of a name; empty if there was none."""
        return next((found for found in reversed(self.events) if found["event"] == event), Said())


def read_runs(paths: Sequence[Path], limit: int = LIMIT) -> list[Run]:
    """The runs of some folders, each once, with names that tell them apart. UsageError for another folder."""
    places: dict[str, Path] = {}
    for path in paths:
        places.setdefault(os.path.realpath(path), path)
    runs = [read_run(path, limit) for path in places.values()]
    for number, (run, name) in enumerate(zip(runs, names([run.path for run in runs]), strict=True)):
        run.number, run.name, run.is_alone = number, name, len(runs) == 1
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
            status=Said(read_status(path / STATUS)),
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
    if not exists(path):
        found = "nothing there: give the path of a run"
    elif not os.path.isdir(path):
        found = "a file: give its folder"
    elif any(os.path.exists(path / name) for name in (METRICS, STATUS)):
        return
    elif os.path.exists(folders.weights_in(path)):
        found = f"a checkpoint: give the folder around it, {Path(os.path.realpath(path)).parent}"
    else:
        found = "neither: give the path of a run"
    wanted = f"expected the folder of a run (what --out named), which holds {METRICS} or {STATUS}"
    raise UsageError(f"{shown(path)}: {wanted}; found {found}")


def read_config(path: Path) -> Said:
    """The settings of a run; empty if they cannot be read."""
    try:
        return Said(islice(parse_toml(read_file(path, MOST_SETTINGS)).items(), MOST_KEYS))
    except ValueError:  # FileError is one
        return Said()


def read_events(path: Path) -> list[Said]:
    """The newest events of a run, oldest first; a line that is none is left out."""
    found, size = deque[tuple[int, Said]](), 0
    with suppress(FileError):
        for line in read_lines(path, b'"event"'):
            with suppress(ValueError):
                event = parse_json(line, null_for_infinite=True)
                if isinstance(event, dict) and Said(event).text("event"):
                    found.append((len(line), Said(event)))
                    size += len(line)
            while size > MOST_HISTORY:
                size -= found.popleft()[0]
    return [event for _, event in found]


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
    keys, own = keys_of(state), keys_of(model)
    return Checkpoint(
        folder.name,
        step,
        nbytes=sum(path.stat().st_size for path in folder.glob("*.gguf")),
        digest=keys.text(STATE_DIGEST) or "",
        parameters=sum(spec.size for spec in model.tensors.values()),
        architecture=own.architecture or "",
        problem="" if keys.text(ID) == own.text(ID) else "its two files are of two checkpoints",
    )
