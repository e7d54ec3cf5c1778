"""Which charts a report has, as data: what each shows, its unit, and how its numbers are written.

A chart is there if at least one run has one of its numbers. `Points` is a curve ready to draw, from the
columns of `metrics`; `marks` are the moments in a run that its curves should show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from zero_mpi.cli.text import count, percent, plain, size
from zero_mpi.report.columns import MEMORY, WAITS, Floats, Metrics
from zero_mpi.report.runs import LOST, Event, Run, integer, text

MOST_MARKS = 300  # of a run, saves apart; more would be a grey wall
FAULT, RESUMED, STOPPED, WARNING, SAVED = "fault", "resumed", "stopped", "warning", "saved"
KINDS = {
    "resumed": RESUMED, "lost": FAULT, "failed": FAULT,
    "stopped": STOPPED, "warning": WARNING, "saved": SAVED,
}  # fmt: skip


@dataclass(frozen=True)
class Series:
    """One curve of each run in a chart; `dots` is for values at few steps."""

    key: str
    title: str
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart. `form` is one of FORMS; `from_zero`: amounts, whose axis begins at 0."""

    id: str
    title: str
    unit: str
    series: tuple[Series, ...]
    form: str = "plain"
    from_zero: bool = False
    log: bool = False  # whether a reader may want a logarithmic scale
    about: str = ""


CHARTS = (
    Chart(
        "loss",
        "Loss",
        "nats a token",
        (Series("loss", "training"), Series("val_loss", "validation", dots=True)),
        log=True,
        about="Mean negative logarithm of the likelihood of a token; validation is on held-out text.",
    ),
    Chart("lr", "Learning rate", "", (Series("lr", "learning rate"),), from_zero=True),
    Chart(
        "grad_norm",
        "Gradient norm",
        "before clipping",
        (Series("grad_norm", "gradient norm"),),
        log=True,
        about="Euclidean norm of the whole gradient.",
    ),
    Chart(
        "speed", "Throughput", "tokens a second, all ranks", (Series("tokens_per_second", "tokens/s"),),
        form="count", from_zero=True,
    ),
    Chart(
        "mfu", "Share of peak", "of the measured matrix products", (Series("mfu", "share of peak"),),
        form="percent", from_zero=True,
    ),
    Chart(
        "memory", "Memory of a rank", "largest; band: from the smallest", (Series(MEMORY, "largest rank"),),
        form="bytes", from_zero=True,
    ),
    Chart(
        "bytes", "Bytes moved", "that rank 0 gave to others, a step", (Series("sent_bytes", "bytes a step"),),
        form="bytes", from_zero=True,
    ),
    Chart(
        "waits", "Exposed waits", "share of the step, on rank 0", (Series(WAITS, "waiting"),),
        form="percent", from_zero=True, about="How long rank 0 stood waiting for transfers.",
    ),
)  # fmt: skip


FORMS: dict[str, Callable[[float], str]] = {
    "plain": plain,
    "count": count,
    "bytes": lambda value: size(int(value)),
    "percent": percent,
}


def written(value: float, form: str) -> str:
    """A number in the form of its chart."""
    return FORMS[form](value) if math.isfinite(value) else "not finite"


@dataclass(frozen=True)
class Points:
    """A curve of one run: arrays over the columns that have it.

    mean       nan where no value of the column was finite, which is a gap
    odd        whether some value was not finite
    """

    step: Floats
    mean: Floats
    least: Floats
    greatest: Floats
    odd: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

    @property
    def has_band(self) -> bool:
        """Whether some column holds values that differ."""
        return bool(np.any(self.greatest > self.least))


def points(metrics: Metrics, key: str) -> Points:
    """The curve of a number; without points where no record has it."""
    used, curve = metrics.used, metrics.curves[key]
    count, odd = curve["count"][used], curve["odd"][used] > 0
    there = np.flatnonzero((count > 0) | odd)
    columns = used[there]
    blank = count[there] == 0
    return Points(
        metrics.at["step"]["greatest"][columns],
        curve.mean[columns],
        np.where(blank, np.nan, curve["least"][columns]),
        np.where(blank, np.nan, curve["greatest"][columns]),
        odd[there],
    )


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """The charts for which there are numbers."""
    return [chart for chart in CHARTS if any(has(run, series.key) for run in runs for series in chart.series)]


def has(run: Run, key: str) -> bool:
    """Whether a run has any value of a number."""
    return not run.metrics.curves[key].is_empty


@dataclass(frozen=True)
class RunMark:
    """A moment in a run: after which step, of which kind, and what happened."""

    step: int
    kind: str
    about: str


def marks(run: Run) -> list[RunMark]:
    """The moments that curves should show, in order of steps; of very many the last and some saves."""
    found = list(all_marks(run))
    saves = [mark for mark in found if mark.kind == SAVED]
    kept = set(saves[:: -(-len(saves) // MOST_MARKS) or 1])
    kept |= set([mark for mark in found if mark.kind != SAVED][-MOST_MARKS:])
    return sorted(kept, key=lambda mark: mark.step)


def all_marks(run: Run) -> Iterator[RunMark]:
    """Of the events, or of the last state and the checkpoints where a run has no events."""
    for event in run.events:
        kind, step = KINDS.get(event["event"]), integer(event.get("step"))
        if kind is not None and step is not None:
            yield RunMark(step, kind, about(event))
    if run.state == LOST or (not run.events and run.state in ("failed", "stopped")):
        kind = STOPPED if run.state == "stopped" else FAULT
        yield RunMark(run.step, kind, " ".join(filter(None, [run.state, text(run.status.get("reason"))])))
    if not run.events:
        yield from (RunMark(one.step, SAVED, f"saved {one.folder}") for one in run.checkpoints)


def about(event: Event) -> str:
    """An event in a line."""
    name, folder = event["event"], text(event.get("folder"))
    if name == "started":
        ranks = integer(event.get("ranks"))
        return "started" + (f" on {ranks} rank{'s' * (ranks != 1)}" if ranks else "")
    if name == "resumed":
        ranks = integer(event.get("from_ranks"))
        return f"resumed from {folder or 'a checkpoint'}" + (
            f" of {ranks} rank{'s' * (ranks != 1)}" if ranks else ""
        )
    if name == "saved":
        return f"saved {folder}"
    if name == "warning":
        return f"warning: {text(event.get('text'))}"
    if name == "sample":
        return f"sample of {folder}" if folder else "sample"
    reason = text(event.get("reason"))
    return f"{name}: {reason}" if reason else name
