"""Which charts a report has, as data: what each shows, its unit, and how its numbers are written.

A chart is there if at least one run has one of its numbers. `Points` is a curve ready to draw, from the
columns of `metrics`; `marks` are the moments in a run that its curves should show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from zero_mpi.cli.text import count, elapsed, percent, plain, plural, size
from zero_mpi.report.columns import CURVES, MEMORY, WAITS, Floats, Metrics, Places
from zero_mpi.report.runs import LOST, Run, Said
from zero_mpi.telemetry.events import GAVE_UP
from zero_mpi.telemetry.status import FAILED

MOST_MARKS = 300  # of a run, saves apart; more would be a grey wall
FAULT, RESUMED, STOPPED, WARNING, SAVED = "fault", "resumed", "stopped", "warning", "saved"
KINDS = {kind: kind for kind in (RESUMED, STOPPED, WARNING, SAVED)}
KINDS |= dict.fromkeys((LOST, FAILED, GAVE_UP), FAULT)


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
    Chart("loss", "Loss", "nats a token",
          (Series("loss", "training"), Series("val_loss", "validation", dots=True)), log=True,
          about="Mean negative logarithm of the likelihood of a token; validation is on held-out text."),
    Chart("lr", "Learning rate", "", (Series("lr", "learning rate"),), from_zero=True),
    Chart("grad_norm", "Gradient norm", "before clipping", (Series("grad_norm", "gradient norm"),), log=True,
          about="Euclidean norm of the whole gradient."),
    Chart("speed", "Throughput", "tokens a second, all ranks", (Series("tokens_per_second", "tokens/s"),),
          form="count", from_zero=True),
    Chart("mfu", "Share of peak", "of the measured matrix products", (Series("mfu", "share of peak"),),
          form="percent", from_zero=True),
    Chart("memory", "Memory of a rank", "largest; band: from the smallest", (Series(MEMORY, "largest rank"),),
          form="bytes", from_zero=True),
    Chart("bytes", "Bytes moved", "that rank 0 gave to others, a step",
          (Series("sent_bytes", "bytes a step"),), form="bytes", from_zero=True),
    Chart("waits", "Exposed waits", "share of the step, on rank 0", (Series(WAITS, "waiting"),),
          form="percent", from_zero=True, about="How long rank 0 stood waiting for transfers."),
)  # fmt: skip
FORMS: dict[str, Callable[[float], str]] = {
    "plain": plain, "count": count, "bytes": lambda value: size(int(value)), "percent": percent,
}  # fmt: skip


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
    curve = metrics.curves[key]
    columns = metrics.used[(curve["count"] + curve["odd"])[metrics.used] > 0]
    is_gap = curve["count"][columns] == 0
    return Points(
        metrics.at["step"]["greatest"][columns],
        curve.mean[columns],
        np.where(is_gap, np.nan, curve["least"][columns]),
        np.where(is_gap, np.nan, curve["greatest"][columns]),
        curve["odd"][columns] > 0,
    )


def stretches(values: Floats) -> list[Places]:
    """The places of a curve, in pieces between its gaps."""
    pieces = np.split(np.arange(len(values)), np.flatnonzero(np.isnan(values)))
    found = [piece[~np.isnan(values[piece])] for piece in pieces]
    return [piece for piece in found if len(piece)]


def curve_name(run: Run, series: Series) -> str:
    """What a legend calls a curve."""
    return series.title if run.is_alone else f"{run.name} {series.title}"


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """The charts for which there are numbers."""
    empty = {key for key in CURVES if all(run.metrics.curves[key].is_empty for run in runs)}
    return [chart for chart in CHARTS if any(series.key not in empty for series in chart.series)]


@dataclass(frozen=True)
class RunMark:
    """A moment in a run: after which step, of which kind, and what happened."""

    step: int
    kind: str
    about: str


def marks(run: Run) -> list[RunMark]:
    """The moments that curves should show, in order of steps; of very many the last and some saves."""
    found = list(dict.fromkeys(all_marks(run)))
    saves = [mark for mark in found if mark.kind == SAVED]
    others = [mark for mark in found if mark.kind != SAVED]
    kept = saves[:: -(-len(saves) // MOST_MARKS) or 1] + others[-MOST_MARKS:]
    return sorted(kept, key=lambda mark: mark.step)


def all_marks(run: Run) -> Iterator[RunMark]:
    """Of the events, or of the last state and the checkpoints where a run has no events."""
    for event in run.events:
        kind, step = KINDS.get(event["event"]), event.count("step")
        if kind is not None and step is not None:
            yield RunMark(step, kind, about(event))
    if run.state == LOST or (not run.events and run.state in (FAILED, STOPPED)):
        yield RunMark(run.step, KINDS[run.state], f"{run.state} {run.status.text('reason')}".rstrip())
    if not run.events:
        yield from (RunMark(one.step, SAVED, f"saved {one.folder}") for one in run.checkpoints)


def about(event: Said) -> str:
    """An event in a line."""
    name, folder, reason = event["event"], event.text("folder"), event.text("reason")
    of = f" of {plural(ranks, 'rank')}" if (ranks := event.count("from_ranks")) else ""
    on = f" on {plural(ranks, 'rank')}" if (ranks := event.count("ranks")) else ""
    said = {
        "started": f"started{on}",
        "resumed": f"resumed from {folder or 'a checkpoint'}{of}",
        "saved": f"saved {folder}",
        "warning": f"warning: {event.text('text')}",
        "sample": f"sample of {folder}" if folder else "sample",
    }
    return said.get(name) or (f"{name}: {reason}" if reason else name)


def in_full(event: Said) -> str:
    """An event with what belongs to it."""
    nbytes, seconds, said = event.count("bytes"), event.seconds("seconds"), about(event)
    if event["event"] == "started":
        known = (event.text(name) for name in ("strategy", "transport", "device", "version"))
        return ", ".join(filter(None, [said, *known]))
    if event["event"] == "saved":
        said += f", {size(nbytes)}" if nbytes else ""
        said += f" in {elapsed(seconds)}" if seconds is not None else ""
    return said
