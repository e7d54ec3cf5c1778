"""A chart as SVG, drawn here so that a page shows its curves without JavaScript, in print and in mail.

Colours and widths are classes of `page.css`. Where a pixel holds several columns, the line is their mean and
the band behind it reaches from the least to the greatest value, as in `chart.js`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from zero_mpi.report.charts import COLOURS, SAVED, Chart, Points, Series, marks, points
from zero_mpi.report.format import labels, shown, ticks
from zero_mpi.report.markup import safe, tag
from zero_mpi.report.metrics import Floats
from zero_mpi.report.run_folder import Run

RIGHT, TOP, BOTTOM = 14, 16, 26  # margins around the curves
LETTER, LEAST_LEFT = 6.6, 46  # width of a digit on an axis; and of the smallest left margin
DOT = 3.2  # radius
ODD, CROSS = 3.5, "l7 7m0-7l-7 7"  # the cross at a value that is not finite: half its size, and its lines
MOST_DOTS, MOST_BARS = 200, 256
WIDEST_BAR, ALL_BARS = 36.0, 640.0  # pixels
GLYPHS = {
    "fault": "M-4-4L4 4M4-4L-4 4",
    "resumed": "M-3.5-4.5L4.5 0L-3.5 4.5Z",
    "stopped": "M-3.5-3.5H3.5V3.5H-3.5Z",
    "warning": "M0-4.5L4.5 4H-4.5Z",
    "saved": "M0-3.5L3.5 0L0 3.5L-3.5 0Z",
}


@dataclass(frozen=True)
class Frame:
    """Where numbers lie in a picture: pixels of a step and of a value."""

    width: int
    height: int
    left: float
    x: tuple[float, float]
    y: tuple[float, float]

    def across(self, values: Floats) -> Floats:
        """Pixels from the left."""
        low, high = self.x
        return np.asarray(self.left + (values - low) / (high - low) * (self.width - self.left - RIGHT))

    def down(self, values: Floats) -> Floats:
        """Pixels from the top."""
        low, high = self.y
        return np.asarray(TOP + (high - values) / (high - low) * (self.height - TOP - BOTTOM))


def draw(chart: Chart, runs: Sequence[Run], width: int, height: int) -> str:
    """The whole picture, with a title and a description for those who cannot see it."""
    curves = [
        (number, series, found)
        for number, run in enumerate(runs)
        for series in chart.series
        if len((found := points(run.metrics, series.key)).step)
    ]
    frame = frame_of(chart, [found for _, _, found in curves], width, height)
    parts = [
        tag("title", safe(chart.title), id=f"{chart.id}-title"),
        tag("desc", safe(describe(chart, runs)), id=f"{chart.id}-about"),
        *axes(chart, frame),
        *(part for number, run in enumerate(runs) for part in mark_lines(run, number, frame)),
        *(curve_parts(frame, *curve) for curve in curves),
    ]
    about = f"{chart.id}-title {chart.id}-about"
    return tag(
        "svg", *parts, class_="plot", role="img", viewBox=f"0 0 {width} {height}", aria_labelledby=about
    )


def describe(chart: Chart, runs: Sequence[Run]) -> str:
    """The curves in words: last, least and greatest value of each."""
    said = [
        f"{run.name}, {series.title}: last {shown(run.metrics.last[series.key], chart.form)}, "
        f"from {shown(low, chart.form)} to {shown(high, chart.form)}."
        for run in runs
        for series in chart.series
        if series.key in run.metrics.last
        for low, high in [run.metrics.curves[series.key].extent]
    ]
    return f"{chart.title} ({chart.unit}) over steps. {' '.join(said)}" if chart.unit else " ".join(said)


def frame_of(chart: Chart, curves: Sequence[Points], width: int, height: int) -> Frame:
    """A frame around all curves; its left margin has room for the longest label."""
    y = span(
        np.concatenate([*(found.least for found in curves), *(found.greatest for found in curves), []]),
        from_zero=chart.from_zero,
    )
    steps = np.concatenate([found.step for found in curves] or [np.zeros(0)])
    low, high = (float(steps.min()), float(steps.max())) if len(steps) else (0.0, 1.0)
    longest = max(map(len, labels(ticks(*y, 5, chart.form), chart.form)), default=1)
    return Frame(
        width, height, max(LEAST_LEFT, 12 + LETTER * longest), (low, high if high > low else low + 1), y
    )


def span(values: Floats, *, from_zero: bool) -> tuple[float, float]:
    """The range of an axis, a little wider than its values and never empty."""
    fine = values[np.isfinite(values)]
    low, high = (float(fine.min()), float(fine.max())) if len(fine) else (0.0, 1.0)
    low = min(low, 0.0) if from_zero else low
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (low if from_zero and low == 0 else low - room), high + room


def axes(chart: Chart, frame: Frame) -> Iterator[str]:
    """Grid lines with their labels."""
    end, base = frame.width - RIGHT, frame.height - BOTTOM
    rows = ticks(*frame.y, max(2, (base - TOP) // 40), chart.form)
    for value, text in zip(rows, labels(rows, chart.form), strict=True):
        y = float(frame.down(np.array(value)))
        yield rule("grid", frame.left, end, y)
        yield label(text, frame.left - 7, y + 3.6, "end")
    places = [place for place in ticks(*frame.x, max(2, frame.width // 100)) if place == int(place)]
    for value, text in zip(places, labels(places, "count"), strict=True):
        yield label(text, float(frame.across(np.array(value))), base + 17, "middle")
    yield label("step", 2, base + 17, "start", "tick name")
    yield rule("base", frame.left, end, base)


def rule(kind: str, start: float, end: float, y: float) -> str:
    """A level line."""
    return tag("line", class_=kind, x1=f"{start:.1f}", x2=f"{end:.1f}", y1=f"{y:.1f}", y2=f"{y:.1f}")


def label(text: str, x: float, y: float, anchor: str, kind: str = "tick") -> str:
    """A text on an axis."""
    return tag("text", safe(text), class_=kind, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)


def mark_lines(run: Run, number: int, frame: Frame) -> Iterator[str]:
    """Upright lines at faults, resumes and stops; small signs on the axis at saves."""
    base = frame.height - BOTTOM
    for mark in marks(run):
        step = min(max(mark.step, frame.x[0]), frame.x[1])
        x = float(frame.across(np.array(step)))
        yield tag(
            "g",
            tag("title", safe(f"step {mark.step}: {mark.about}")),
            "" if mark.kind == SAVED else tag("path", class_="stem", d=f"M{x:.1f} {base}V{TOP}"),
            glyph(mark.kind, x, base if mark.kind == SAVED else TOP - 8),
            class_=f"mark {mark.kind} {colour(number)}",
        )


def glyph(kind: str, x: float, y: float) -> str:
    """The sign of a kind of mark: a cross, a triangle, a square; told apart without colour."""
    return tag("path", class_="glyph", transform=f"translate({x:.1f} {y:.1f})", d=GLYPHS[kind])


def curve_parts(frame: Frame, number: int, series: Series, found: Points) -> str:
    """Band, line, dots and crosses of one curve."""
    x, mean, least, greatest = per_pixel(frame.across(found.step), found)
    parts = []
    if np.any(greatest > least):
        parts.append(tag("path", class_="band", d=band(x, frame.down(least), frame.down(greatest))))
    parts.append(tag("path", class_="line", d=line(x, frame.down(mean))))
    if series.dots and len(x) <= MOST_DOTS:
        places = zip(x.tolist(), frame.down(mean).tolist(), strict=True)
        parts += [
            tag("circle", class_="dot", cx=f"{a:.1f}", cy=f"{b:.1f}", r=DOT)
            for a, b in places
            if not math.isnan(b)
        ]
    base = frame.height - BOTTOM - 8
    for at in np.unique(np.round(frame.across(found.step[found.odd]))).tolist():
        parts.append(tag("path", class_="odd", d=f"M{at - ODD:.1f} {base - ODD}{CROSS}"))
    kind = "val" if series.dots else "main"
    return tag("g", *parts, class_=f"curve {colour(number)} {kind}", data_run=number)


def per_pixel(x: Floats, found: Points) -> tuple[Floats, Floats, Floats, Floats]:
    """(x, mean, least, greatest) with at most one point for each pixel across; a gap stays one."""
    pixel = np.floor(x).astype(np.int64)
    starts = np.flatnonzero(np.diff(pixel, prepend=pixel[:1] - 1))
    if len(starts) == len(x):
        return x, found.mean, found.least, found.greatest
    fine = ~np.isnan(found.mean)
    total = np.add.reduceat(np.where(fine, found.mean, 0.0), starts)
    number = np.add.reduceat(fine.astype(np.float64), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = total / number
    least = np.minimum.reduceat(np.where(fine, found.least, np.inf), starts)
    greatest = np.maximum.reduceat(np.where(fine, found.greatest, -np.inf), starts)
    blank = number == 0
    return x[starts], mean, np.where(blank, np.nan, least), np.where(blank, np.nan, greatest)


def pieces(values: Floats) -> Iterator[slice]:
    """The stretches without a gap."""
    edges = [-1, *np.flatnonzero(np.isnan(values)).tolist(), len(values)]
    yield from (slice(start + 1, stop) for start, stop in pairwise(edges) if stop - start > 1)


def line(x: Floats, y: Floats) -> str:
    """A path through points, broken at gaps; a point alone becomes a short stroke."""
    found = []
    for part in pieces(y):
        places = [f"{a:.1f} {b:.1f}" for a, b in zip(x[part], y[part], strict=True)]
        found.append(f"M{'L'.join(places)}" + ("h.1" if len(places) == 1 else ""))
    return "".join(found)


def band(x: Floats, low: Floats, high: Floats) -> str:
    """The area between two lines, broken at gaps."""
    found = []
    for part in pieces(low):
        there = [f"{a:.1f} {b:.1f}" for a, b in zip(x[part], high[part], strict=True)]
        back = [f"{a:.1f} {b:.1f}" for a, b in zip(x[part][::-1], low[part][::-1], strict=True)]
        found.append(f"M{'L'.join(there + back)}Z")
    return "".join(found)


def colour(number: int) -> str:
    """The classes of a run's colour."""
    return f"c{number % COLOURS}" + (" again" if number >= COLOURS else "")


def bars(values: Sequence[float], name: str, number: int, height: int = 110) -> str:
    """A bar for each rank's memory; where ranks are many, the largest of neighbours."""
    group = -(-len(values) // MOST_BARS)
    found = [max(values[at : at + group]) for at in range(0, len(values), group)]
    top, base, pitch = max(found) or 1.0, height - 18, min(WIDEST_BAR, ALL_BARS / len(found))
    width, thick, every = max(24, round(pitch * len(found))), pitch * 0.8, -(-len(found) // 16)
    said = (
        f"{name}: from {shown(min(values), 'bytes')} to {shown(max(values), 'bytes')} on {len(values)} ranks"
    )
    parts = [tag("title", safe(said))]
    for place, value in enumerate(found):
        tall, middle = max(1.0, value / top * (base - 6)), (place + 0.5) * pitch
        last = min(len(values), (place + 1) * group) - 1
        ranks = f"rank {place}" if group == 1 else f"ranks {place * group} to {last}"
        parts.append(
            tag(
                "rect",
                tag("title", f"{ranks}: {shown(value, 'bytes')}"),
                x=f"{middle - thick / 2:.1f}",
                y=f"{base - tall:.1f}",
                width=f"{thick:.1f}",
                height=f"{tall:.1f}",
                rx=f"{min(3.0, thick / 4):.1f}",
            )
        )
        if place % every == 0:
            parts.append(label(f"{place * group}", middle, height - 4, "middle"))
    return tag(
        "svg",
        *parts,
        class_=f"bars {colour(number)}",
        role="img",
        width=width,
        viewBox=f"0 0 {width} {height}",
    )
