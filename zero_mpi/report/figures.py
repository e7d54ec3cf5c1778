"""The few numbers that a reader wants first: how far a run is, how well, how fast, and on what.

The page shows them as tiles, or side by side in a table for several runs; the terminal as lines.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from zero_mpi.cli.text import count, elapsed, percent, plain, plural, size
from zero_mpi.files.foreign import shown
from zero_mpi.report.columns import RECENT, is_number
from zero_mpi.report.runs import LOST, Run, Said
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
    of = (f"of {run.steps:,}", min(1.0, run.step / run.steps)) if run.steps else ()
    yield Figure("Step", f"{run.step:,}", *of)
    tokens, seconds, left = run.metrics.at["tokens"].extent[1], run.metrics.seconds, time_left(run)
    if tokens > 0:
        yield Figure("Tokens", count(tokens), "seen so far")
    if seconds:
        note = f"about {elapsed(left)} left" if left else "steps alone"
        yield Figure("Training time", elapsed(seconds), note)


def quality(run: Run) -> Iterator[Figure]:
    """How well it learns."""
    for key, name in (("loss", "Loss"), ("val_loss", "Validation loss")):
        if key in run.metrics.last:
            least, _ = run.metrics.curves[key].extent
            best = f"best {plain(least)}" if math.isfinite(least) else ""
            yield Figure(name, plain(run.metrics.last[key]), best)
    if run.metrics.recent and (skipped := Said(run.metrics.recent[-1]).count("skipped")):
        yield Figure("Steps left out", f"{skipped:,}", "gradient not finite")


def speed(run: Run) -> Iterator[Figure]:
    """How fast it is, lately."""
    rate, share = recent(run, "tokens_per_second"), recent(run, "mfu")
    if rate is not None:
        note = f"median of the last {min(RECENT, run.metrics.records):,} steps"
        yield Figure("Tokens a second", count(rate), note)
    if share is not None:
        yield Figure("Share of peak", percent(share), "of measured matrix products")
    waits, steps = recent(run, "wait_seconds"), recent(run, "step_seconds")
    if waits is not None and steps:
        yield Figure("Exposed waits", percent(waits / steps), "of a step, on rank 0")


def place(run: Run) -> Iterator[Figure]:
    """On what it runs."""
    started = run.latest("started")
    if run.ranks:
        yield Figure("Ranks", f"{run.ranks:,}", ", ".join(filter(None, about_ranks(run))))
    found = (one.parameters for one in reversed(run.checkpoints) if not one.problem)
    parameters = started.count("parameters") or next(found, 0)
    if parameters:
        yield Figure("Parameters", count(parameters), architecture(run))
    planned = started.count("planned_bytes")
    if run.memory:
        note = f"buffers planned: {size(planned)}" if planned else "the largest"
        yield Figure("Memory of a rank", size(int(max(run.memory))), note)
    elif planned:
        yield Figure("Memory of a rank", size(planned), "planned for buffers")


def about_ranks(run: Run) -> Iterator[str]:
    """Hosts, threads, device, precision, strategy and transport; empty what is not known."""
    started = run.latest("started")
    hosts, threads = started.get("hosts"), started.count("threads")
    yield plural(len(hosts), "host") if isinstance(hosts, list) and hosts else ""
    yield f"{plural(threads, 'thread')} each" if threads else ""
    yield from (shown(started.text(name), MOST_WORD) for name in ("device", "precision"))
    yield shown(started.text("strategy") or run.config.text("strategy"), MOST_WORD)
    yield shown(started.text("transport"), MOST_WORD).partition(",")[0]


def architecture(run: Run) -> str:
    """The kind of model."""
    newest = next((one.architecture for one in reversed(run.checkpoints) if one.architecture), "")
    return shown(run.latest("started").text("arch") or newest or run.config.text("arch"), MOST_WORD)


def recent(run: Run, name: str) -> float | None:
    """The median of a number over the last records."""
    values = [float(row[name]) for row in run.metrics.recent if is_number(row.get(name))]
    return statistics.median(values) if values else None


def time_left(run: Run) -> float | None:
    """Seconds of training to come, if the run goes on as it did lately."""
    seconds = recent(run, "step_seconds")
    if run.state != RUNNING or not run.steps or not seconds or run.step >= run.steps:
        return None
    return (run.steps - run.step) * seconds


def state_line(run: Run) -> str:
    """State and reason of a run in a line."""
    reason = run.status.text("reason")
    why = f": {reason}" if reason else ""
    said = {
        LOST: f"lost: it says that it runs, but gave no sign of life for {elapsed(run.silence or 0.0)}",
        RUNNING: "running",
        DONE: "done",
        STOPPED: f"stopped before its last step{why}; the same command goes on",
        FAILED: f"failed{why}",
    }
    return said.get(run.state, run.state) or "state unknown: there is no status.json"
