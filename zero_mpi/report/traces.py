"""Curves and moments of a run as traces of Plotly: lines, the bands behind them, signs.

Where a column holds several steps, the line is their mean and the band reaches from the least to the greatest
value. A gap is a null, and a cross in it tells that a value was not finite. Numbers have as many digits as a
picture needs; all of them are in metrics.jsonl. Where the points lie on each axis stands in a trace's `meta`,
with the class in `page.css` that has its colour: both depend on the reader.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zero_mpi.cli.text import UNITS, power_of_1024
from zero_mpi.files.foreign import shown
from zero_mpi.report.charts import SAVED, Chart, Points, Series, curve_name, marks, points, stretches
from zero_mpi.report.columns import Floats, Places
from zero_mpi.report.runs import Run

Json = dict[str, Any]
DIGITS, EXACT = 5, 16  # of values, and of places on an axis
LEGEND = ("loss", "val_loss")  # the curves that stand for their run
MOST_DOTS = 200
LONGEST_NAME, LONGEST_MARK = 40, 120  # letters
FORMATS = {"count": ".4~s"}  # of numbers under the pointer, in the language of d3; others are
USUAL = ".4~g"
# Kinds of moments: what the legend calls them, sign, colour (none: that of the run), size in pixels. What
# comes later is drawn over what comes before.
SIGNS: dict[str, tuple[str, str, str, int]] = {
    SAVED: ("checkpoint", "diamond", "", 8),
    "warning": ("warning", "triangle-up", "warn", 9),
    "stopped": ("stopped", "square", "warn", 8),
    "resumed": ("resumed", "triangle-right", "ink", 11),
    "fault": ("failed or lost", "x", "bad", 9),
}
COLOURS, SOLID = 8, 4  # of runs in `page.css`; runs whose lines are whole


@dataclass(frozen=True)
class Scale:
    """How a chart writes its numbers: divided by `unit`, with a suffix, in a format of d3."""

    unit: float
    suffix: str
    format: str


def scale_of(chart: Chart, runs: Sequence[Run]) -> Scale:
    """The scale of a chart, by the largest of its numbers."""
    if chart.form == "percent":
        return Scale(0.01, " %", USUAL)
    if chart.form == "bytes":
        found = [run.metrics.curves[series.key].extent[1] for run in runs for series in chart.series]
        power = power_of_1024(max(filter(math.isfinite, found), default=0.0))
        return Scale(1024.0**power, f" {UNITS[power]}", USUAL)
    return Scale(1.0, "", FORMATS.get(chart.form, USUAL))


def curve_traces(run: Run, series: Series, scale: Scale) -> Iterator[Json]:
    """Band, line and crosses of one curve."""
    found = points(run.metrics, series.key)
    if not len(found.step):
        return
    colour = of_validation(run) if series.dots else class_of(run.number)
    name, value, span = label(curve_name(run, series)), f"%{{y:{scale.format}}}{scale.suffix}", {}
    common = {"type": "scatter", "name": name, "legendgroup": group(run), "showlegend": False}
    if found.has_band:
        at, edge = outline(found)
        about = {"colour": colour, "x": places(run, np.where(at < 0, np.nan, found.step[at]))}
        band = {"y": short(edge / scale.unit), "mode": "none", "fill": "toself", "hoverinfo": "skip"}
        yield {**common, **band, "opacity": 0.19, "meta": about}
        ends = [short(values / scale.unit) for values in (found.least, found.greatest)]
        span = {"customdata": list(zip(*ends, strict=True))}
        value += f" (%{{customdata[0]:{scale.format}}} to %{{customdata[1]:{scale.format}}})"
    yield {
        **common,
        **span,
        "showlegend": series.key in LEGEND,
        "y": short(found.mean / scale.unit),
        "mode": "lines+markers" if series.dots and len(found.step) <= MOST_DOTS else "lines",
        "line": {"width": 1.8, "dash": dash(run.number)},
        "marker": {"size": 6, "symbol": "circle-open", "line": {"width": 1.8}},
        "hovertemplate": value,
        "meta": {"colour": colour, "x": places(run, found.step), "smooth": not series.dots},
    }
    if found.odd.any():
        yield {
            **common,
            "y": short(between(found.mean)[found.odd] / scale.unit),
            "mode": "markers",
            "marker": {"size": 8, "symbol": "x-thin", "line": {"width": 2}},
            "hovertemplate": "not finite",
            "meta": {"colour": "bad", "x": places(run, found.step[found.odd])},
        }


def mark_traces(run: Run) -> Iterator[Json]:
    """The moments of a run by their kind, in its line of the strip above the charts."""
    found = marks(run) if len(axis(run, "step")) else []
    for kind, (name, symbol, colour, pixels) in SIGNS.items():
        of_kind = [mark for mark in found if mark.kind == kind]
        if of_kind:
            yield {
                "type": "scatter",
                "name": name,
                "legendgroup": group(run),
                "mode": "markers",
                "y": [-run.number - 0.5 * (kind == SAVED)] * len(of_kind),
                "marker": {"size": pixels, "symbol": symbol},
                "text": [in_lines(f"step {mark.step:,}: {mark.about}") for mark in of_kind],
                "hovertemplate": "%{text}<extra></extra>",
                "meta": {
                    "colour": colour or class_of(run.number),
                    "x": places(run, np.array([mark.step for mark in of_kind], np.float64)),
                    "upright": kind != SAVED,
                },
            }


def class_of(number: int) -> str:
    """The class of a run's colour in the style of the page; a ninth run has the first one again."""
    return f"c{number % COLOURS}"


def of_validation(run: Run) -> str:
    """The class of validation: of a run that is alone another colour, else a tone of its own."""
    return class_of(run.number + 1) if run.is_alone else f"{class_of(run.number)} tone"


def dash(number: int) -> str:
    """How a run's lines are broken."""
    return "solid" if number < SOLID else "dash" if number < COLOURS else "dot"


def group(run: Run) -> str:
    """What the legend switches on and off together: all of a run where there are several."""
    return "" if run.is_alone else f"run {run.number}"


def axis(run: Run, name: str) -> Floats:
    """Where each column ends on an axis; empty if the records do not say, else never falling."""
    found = run.metrics.at[name]["greatest"][run.metrics.used]
    fine = np.isfinite(found)
    return np.maximum.accumulate(np.where(fine, found, 0.0)) if fine.any() else np.zeros(0)


def places(run: Run, steps: Floats) -> Json:
    """Where steps lie on each axis: between two columns in proportion, outside at the ends."""
    known = {name: axis(run, name) for name in run.metrics.at}
    return {
        name: short(np.interp(steps, known["step"], there), EXACT) if len(there) else []
        for name, there in known.items()
    }


def outline(found: Points) -> tuple[Places, Floats]:
    """The edge of a band as (places among the points, values): closed for each stretch, a gap (-1) behind."""
    at, edge = list[Places](), list[Floats]()
    for there in stretches(found.mean):
        at += [there, there[::-1], np.array([-1])]
        edge += [found.greatest[there], found.least[there[::-1]], np.array([np.nan])]
    return np.concatenate(at), np.concatenate(edge)


def between(values: Floats) -> Floats:
    """A curve with its gaps filled by a straight line; zeros where it is nothing but a gap."""
    at, there = np.arange(len(values)), np.flatnonzero(~np.isnan(values))
    return np.interp(at, there, values[there]) if len(there) else np.zeros(len(values))


def short(values: Floats, digits: int = DIGITS) -> list[float | int | None]:
    """Numbers with that many digits; None for a gap."""
    return [rounded(value, digits) if math.isfinite(value) else None for value in values.tolist()]


def rounded(value: float, digits: int) -> float | int:
    """A number with fewer digits; whole ones without a point."""
    found = float(f"{value:.{digits}g}")
    return int(found) if found.is_integer() and abs(found) < 1e15 else found


def label(text: str) -> str:
    """A foreign name for Plotly, which reads some HTML in what it draws."""
    return html.escape(shown(text, LONGEST_NAME), quote=False)


def in_lines(text: str) -> str:
    """A longer foreign text for Plotly, in lines."""
    lines = textwrap.wrap(shown(text, LONGEST_MARK), LONGEST_NAME)
    return "<br>".join(html.escape(line, quote=False) for line in lines)
