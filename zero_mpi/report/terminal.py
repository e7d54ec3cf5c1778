"""The report in a terminal, for people on ssh: figures as lines, and curves in braille dots by plotille.

As wide as the terminal. Colours are left out where the output goes to a file or NO_COLOR is set; which curve
is whose then stands in the legend by the sign that marks it.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from zero_mpi.cli.text import count, plural, power_of_1024
from zero_mpi.errors import import_optional
from zero_mpi.files.foreign import LONGEST_LINE, cut, printable, shown
from zero_mpi.report.charts import SAVED, Chart, charts_of, curve_name, marks, points, stretches, written
from zero_mpi.report.columns import Floats
from zero_mpi.report.figures import figures, state_line
from zero_mpi.report.runs import Run

COLOURS = (33, 208, 36, 170, 178, 137, 245, 99)  # of 256, like those of the page
SIGNS = "*+x#%&@="  # of dotted curves, and of all where there are no colours
LEAST, MOST = 40, 160  # columns of the whole
TALL, FLAT = 16, 10  # lines of a curve at most: of the loss, of others
LABEL, MARGINS = 12, 24  # columns that plotille takes for labels, and for all beside the curves
LAST_MARKS = 8


def terminal(runs: Sequence[Run]) -> Iterator[str]:
    """All lines. UsageError if plotille is not installed."""
    library = import_optional("--text", "report", "plotille")
    width = min(max(shutil.get_terminal_size().columns, LEAST), MOST)
    for run in runs:
        yield from about(run, width)
        yield ""
    for chart in charts_of(runs):
        yield from curves(library, chart, runs, width)
        yield ""


def about(run: Run, width: int) -> Iterator[str]:
    """State and figures of a run."""
    yield shown(f"{run.name}: {state_line(run)}", LONGEST_LINE)
    found = figures(run)
    name_width, value_width = (max(len(getattr(one, name)) for one in found) for name in ("name", "value"))
    for one in found:
        yield printable(f"  {one.name:{name_width}}  {one.value:{value_width}}  {one.note}").rstrip()[:width]
    moments = [mark for mark in marks(run) if mark.kind != SAVED][-LAST_MARKS:]
    for place, mark in enumerate(moments):
        what = printable(cut(mark.about, MOST))
        yield f"  {'' if place else 'Events':{name_width}}  step {mark.step:,}: {what}"[:width]


def curves(library: ModuleType, chart: Chart, runs: Sequence[Run], width: int) -> Iterator[str]:
    """A chart: title, curves, and which is whose where there are several."""
    every = [(run, series, points(run.metrics, series.key)) for run in runs for series in chart.series]
    found = [(run, series, one) for run, series, one in every if np.isfinite(one.mean).any()]
    if not found:
        return
    figure, legend = library.Figure(), []
    # Whether colours will be seen as colours: plotille asks NO_COLOR, FORCE_COLOR and the terminal.
    figure.with_colors = os.environ.get("TERM") != "dumb" and library.color("x", fg=1, mode="byte") != "x"
    figure.color_mode, figure.origin = "byte", False
    figure.width, figure.x_label, figure.y_label = width - MARGINS, "step", ""
    figure.x_ticks_fkt = lambda low, high: count(round(low))
    figure.y_ticks_fkt = lambda low, high: f"{written(low, chart.form):>{LABEL - 2}}"
    steps = np.concatenate([one.step for *_, one in found])
    figure.set_x_limits(steps.min(), max(steps.max(), steps.min() + 1))
    spread = span(np.concatenate([one.mean for *_, one in found]), from_zero=chart.from_zero)
    bottom, top, figure.height = lines_of(*spread, TALL if chart.id == "loss" else FLAT, chart.form)
    figure.set_y_limits(bottom, top)
    for run, series, one in found:
        is_dotted = series.dots or not (run.is_alone or figure.with_colors)
        sign = SIGNS[run.number % len(SIGNS)] if is_dotted else None
        colour = COLOURS[(run.number + (run.is_alone and series.dots)) % len(COLOURS)]
        plot(figure, one.step, one.mean, colour, sign)
        in_colour = library.color(sign or "\u2014", fg=colour, mode="byte", no_color=not figure.with_colors)
        legend.append(f"{' ' * LABEL}{in_colour} {shown(curve_name(run, series))}")
    yield ", ".join(filter(None, [chart.title, chart.unit.partition(";")[0]]))
    yield from (line.rstrip(" \u2800") for line in figure.show().splitlines()[1:])  # the first names the axis
    yield from legend if len(legend) > 1 else ()
    odd = sum(int(one.odd.sum()) for *_, one in found)
    if odd:
        yield f"{' ' * LABEL}not finite at {plural(odd, 'point')}"


def lines_of(low: float, high: float, most: int, form: str) -> tuple[float, float, int]:
    """(low, high, lines): a range whose every line is at a round number, for plotille labels them all."""
    unit = 1024.0 ** power_of_1024(max(abs(low), abs(high))) if form == "bytes" else 1.0
    power = unit * 10.0 ** math.floor(math.log10((high - low) / unit / most))
    for step in (power, 2 * power, 5 * power, 10 * power, 20 * power):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if 0 < last - first <= most:
            return first * step, last * step, last - first
    return low, high, most


def span(values: Floats, *, from_zero: bool) -> tuple[float, float]:
    """The range of an axis, a little wider than its values and never empty."""
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    low = min(low, 0.0) if from_zero else low
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (low if from_zero and low == 0 else low - room), high + room


def plot(figure: Any, steps: Floats, values: Floats, colour: int, sign: str | None) -> None:
    """A curve, in pieces where it has gaps; of as few points as the picture has dots across."""
    for there in stretches(values):
        thin = there[:: max(1, math.ceil(len(there) / (4 * figure.width)))]
        figure.plot(steps[thin].tolist(), values[thin].tolist(), lc=colour)
        if sign:
            few = thin[:: max(1, len(thin) // 12)] if len(thin) > figure.width // 4 else thin
            figure.scatter(steps[few].tolist(), values[few].tolist(), lc=colour, marker=sign)
