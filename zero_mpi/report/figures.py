"""The few numbers that a reader wants first: how far a run is, how well, how fast, and on what.

The page shows them as tiles, or side by side in a table for several runs; the terminal as lines.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zero_mpi.cli.text import count, elapsed, percent, plain, size
from zero_mpi.files.foreign import shown
from zero_mpi.report.columns import RECENT, is_number
from zero_mpi.report.runs import LOST, Run, integer, text
from zero_mpi.telemetry.status import DONE, FAILED, RUNNING, STOPPED

MOST_WORD = 60  # letters of what is said beside a figure


@dataclass(frozen=True)
class Figure:
    """A number with its name; `note` says what it is beside."""

    name: str
    value: str
    note: str = ""
    share: float | None = None  # of the way, where there is one


def figures(run: Run) -> list[Figure]:
    """What is known of a run."""
    return [*progress(run), *quality(run), *speed(run), *place(run)]


def progress(run: Run) -> Iterator[Figure]:
    """How far it is."""
    if run.steps:
        share = min(1.0, run.step / run.steps)
        yield Figure("Step", f"{run.step:,}", f"of {run.steps:,}", share)
    else:
        yield Figure("Step", f"{run.step:,}")
    tokens = run.metrics.at["tokens"].extent[1]
    if tokens > 0:
        yield Figure("Tokens", count(tokens), "seen so far")
    if run.metrics.seconds:
        left = time_left(run)
        yield Figure(
            "Training time",
            elapsed(run.metrics.seconds),
            f"about {elapsed(left)} left" if left else "steps alone",
        )


def quality(run: Run) -> Iterator[Figure]:
    """How well it learns."""
    for key, name in (("loss", "Loss"), ("val_loss", "Validation loss")):
        if key in run.metrics.last:
            least, _ = run.metrics.curves[key].extent
            yield Figure(
                name, plain(run.metrics.last[key]), f"best {plain(least)}" if math.isfinite(least) else ""
            )
    skipped = integer(run.metrics.recent[-1].get("skipped")) if run.metrics.recent else None
    if skipped:
        yield Figure("Steps left out", f"{skipped:,}", "gradient not finite")


def speed(run: Run) -> Iterator[Figure]:
    """How fast it is, lately."""
    rate, share = recent(run, "tokens_per_second"), recent(run, "mfu")
    note = f"median of the last {min(RECENT, run.metrics.records):,} steps"
    if rate is not None:
        yield Figure("Tokens a second", count(rate), note)
    if share is not None:
        yield Figure("Share of peak", percent(share), "of measured matrix products")
    waits, steps = recent(run, "wait_seconds"), recent(run, "step_seconds")
    if waits is not None and steps:
        yield Figure("Exposed waits", percent(waits / steps), "of a step, on rank 0")


def place(run: Run) -> Iterator[Figure]:
    """On what it runs."""
    started = run.latest("started")
    ranks = integer(started.get("ranks")) or integer(run.status.get("ranks"))
    if ranks:
        yield Figure("Ranks", f"{ranks:,}", ", ".join(about_ranks(run, started)))
    newest = next((one for one in reversed(run.checkpoints) if not one.problem), None)
    parameters = integer(started.get("parameters")) or (newest.parameters if newest else 0)
    if parameters:
        yield Figure("Parameters", count(parameters), architecture(run))
    planned = integer(started.get("planned_bytes"))
    memory = run.memory
    if memory:
        plan = f"buffers planned: {size(planned)}" if planned else "the largest"
        yield Figure("Memory of a rank", size(int(max(memory))), plan)
    elif planned:
        yield Figure("Memory of a rank", size(planned), "planned for buffers")


def about_ranks(run: Run, started: Mapping[str, Any]) -> Iterator[str]:
    """Hosts, threads, device, strategy and transport."""
    hosts = started.get("hosts")
    if isinstance(hosts, list) and hosts:
        yield f"{len(hosts)} host{'s' * (len(hosts) != 1)}"
    threads = integer(started.get("threads"))
    if threads:
        yield f"{threads} thread{'s' * (threads != 1)} each"
    yield from filter(None, (word(started.get(name)) for name in ("device", "precision")))
    strategy = word(started.get("strategy")) or word(run.config.get("strategy"))
    yield from filter(None, (strategy, word(started.get("transport")).partition(",")[0]))


def architecture(run: Run) -> str:
    """The kind of model."""
    newest = next((one.architecture for one in reversed(run.checkpoints) if one.architecture), "")
    return word(run.latest("started").get("arch")) or word(newest) or word(run.config.get("arch"))


def word(value: Any) -> str:
    """A value that should be a short text."""
    return shown(text(value), MOST_WORD)


def recent(run: Run, name: str) -> float | None:
    """The median of a number over the last records."""
    values = [float(row[name]) for row in run.metrics.recent if name in row and is_number(row[name])]
    return statistics.median(values) if values else None


def time_left(run: Run) -> float | None:
    """Seconds of training to come, if the run goes on as it did lately."""
    seconds = recent(run, "step_seconds")
    if run.state != RUNNING or not run.steps or not seconds or run.step >= run.steps:
        return None
    return (run.steps - run.step) * seconds


def state_line(run: Run) -> str:
    """State and reason of a run in a line."""
    reason = text(run.status.get("reason"))
    if run.state == LOST:
        return f"lost: it says that it runs, but gave no sign of life for {elapsed(run.silence or 0.0)}"
    said = {
        RUNNING: "running",
        DONE: "done",
        STOPPED: f"stopped before its last step{f': {reason}' * bool(reason)}; the same command goes on",
        FAILED: f"failed: {reason}" if reason else "failed",
    }
    return said.get(run.state, run.state) or "state unknown: there is no status.json"
