"""The page: one HTML file with its style, its script and its numbers inside, which loads nothing.

Its Content-Security-Policy lets no style and no script run but these two, by their hashes, and lets nothing
be fetched: a hostile name or sample could not act even if it were not escaped.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from zero_mpi import __version__
from zero_mpi.report.charts import SAVED, Chart, charts_of, marks
from zero_mpi.report.format import shown
from zero_mpi.report.head import head
from zero_mpi.report.markup import safe, tag
from zero_mpi.report.payload import payload
from zero_mpi.report.run_folder import Run
from zero_mpi.report.sections import sections
from zero_mpi.report.svg import CROSS, colour, draw, glyph

HERE = Path(__file__).parent
SCRIPTS, STYLE = ("numbers.js", "chart.js", "page.js"), "page.css"
WIDE, NARROW = (1130, 320), (550, 214)  # pixels of the charts
SIGNS = {
    "fault": "failed or lost",
    "resumed": "resumed",
    "stopped": "stopped",
    "warning": "warning",
    SAVED: "checkpoint",
}
ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Cpath "
    "d='M2 3c3 9 6 10 12 10' fill='none' stroke='%230072b2' stroke-width='2.5'/%3E%3C/svg%3E"
)


def page(runs: Sequence[Run], now: datetime) -> str:
    """The whole file."""
    charts = charts_of(runs)
    style = read(STYLE)
    code = "\n".join(map(read, SCRIPTS))
    script = f'(() => {{\n"use strict";\n{code}}})();\n'
    about = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy(style, script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content=f"zero_mpi {__version__}"),
        tag("title", safe(", ".join(run.name for run in runs)), " - zero_mpi report"),
        tag("link", rel="icon", href=ICON),
        f"<style>{style}</style>",
    )
    pictures = tag("div", *(figure(chart, runs) for chart in charts), class_="charts")
    curves = tag("h2", "Curves", class_="unseen") if charts else ""
    main = tag("main", curves, pictures, *sections(runs, charts))
    body = tag(
        "body",
        tag("div", head(runs), main, footer(runs, now), class_="wrap lone" if len(runs) == 1 else "wrap"),
        f'<script type="application/json" id="data">{payload(runs, charts)}</script>\n',
        f"<script>{script}</script>\n",
    )
    return f"<!doctype html>\n{tag('html', about, body, lang='en')}\n"


def read(name: str) -> str:
    """A file beside this one."""
    return (HERE / name).read_text(encoding="utf-8")


def policy(style: str, script: str) -> str:
    """Nothing may run or load but this style and this script; the icon is in the page."""
    return (
        f"default-src 'none'; style-src '{fingerprint(style)}'; script-src '{fingerprint(script)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def fingerprint(text: str) -> str:
    """What a policy calls exactly this text."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def figure(chart: Chart, runs: Sequence[Run]) -> str:
    """A chart with its title, the last values, and room for what a script adds."""
    first = chart.id == "loss"
    log = tag("button", "log", type="button", class_="needs-js", data_log="", aria_pressed="false")
    title = tag("h3", f"{chart.title} ", tag("small", chart.unit), title=chart.about or None)
    keys = f"{chart.title}: arrow keys move, plus and minus zoom, 0 resets"
    tip = tag("div", class_="tip", hidden="")
    picture = draw(chart, runs, *(WIDE if first else NARROW))
    return tag(
        "figure",
        tag("figcaption", title, log if chart.log else ""),
        tag("div", *values(chart, runs), class_="readout"),
        tag("div", picture, tip, class_="canvas", tabindex=0, role="group", aria_label=keys),
        signs(runs) if first else "",
        class_="chart wide" if first else "chart",
        data_chart=chart.id,
    )


def values(chart: Chart, runs: Sequence[Run]) -> Iterator[str]:
    """The last value of each curve, as the script shows them."""
    for number, run in enumerate(runs):
        for series in chart.series:
            if series.key in run.metrics.last:
                names = [run.name] * (len(runs) > 1) + [series.title] * (len(chart.series) > 1) or ["last"]
                yield tag(
                    "span",
                    tag("i", class_=f"key {colour(number)} {'val' if series.dots else 'main'}"),
                    tag("span", safe(" ".join(names))),
                    tag("b", shown(run.metrics.last[series.key], chart.form)),
                )


def signs(runs: Sequence[Run]) -> str:
    """What the signs on the curves mean, of those that there are."""
    kinds = {mark.kind for run in runs for mark in marks(run)}
    found = [
        (tag("g", glyph(kind, 0, 0), class_=f"mark {kind}"), name)
        for kind, name in SIGNS.items()
        if kind in kinds
    ]
    if any(curve["odd"].any() for run in runs for curve in run.metrics.curves.values()):
        found.append((tag("path", class_="odd", d=f"M-3.5-3.5{CROSS}"), "not finite"))
    drawn = [
        tag("span", tag("svg", sign, viewBox="-6 -6 12 12", aria_hidden="true"), name) for sign, name in found
    ]
    return tag("div", *drawn, class_="signs") if drawn else ""


def footer(runs: Sequence[Run], now: datetime) -> str:
    """How the page was made, and what it leaves out."""
    width = max(run.metrics.width for run in runs)
    rule = (
        "Every step is in the curves."
        if width == 1
        else f"A point of a curve is the mean of up to {width:,} steps; the band behind it reaches from the "
        "least to the greatest of them."
    )
    rest = (
        "Where a pixel holds several points, the line is their mean, too. Time is the sum of step times, "
        "without evaluations, checkpoints and pauses. Drag or pinch to zoom, double click to reset."
    )
    made = f"Made by zero_mpi {safe(__version__)} on {now:%Y-%m-%d %H:%M} UTC."
    return tag("footer", tag("p", rule, " ", rest), tag("p", made))
