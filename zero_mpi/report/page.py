"""The page: one HTML file with its style, its script, Plotly and its numbers inside, which loads nothing.

Its Content-Security-Policy lets no script run but these two, by their hashes, and lets nothing be fetched: a
hostile name or sample could not act even if it were not escaped. Plotly is packed, which makes the page 2 MB
instead of 5; the script unpacks it.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from zero_mpi import __version__
from zero_mpi.errors import UsageError
from zero_mpi.report.charts import charts_of
from zero_mpi.report.colours import swatch_styles
from zero_mpi.report.head import head
from zero_mpi.report.markup import safe, tag
from zero_mpi.report.plots import plots
from zero_mpi.report.runs import Run
from zero_mpi.report.sections import sections

HERE = Path(__file__).parent
ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Cpath "
    "d='M2 3c3 9 6 10 12 10' fill='none' stroke='%230072b2' stroke-width='2.5'/%3E%3C/svg%3E"
)


def plotly() -> str:
    """The library that draws, as a script. UsageError if it is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UsageError(
            "the page draws with plotly, which is not installed; install it: pip install 'zero-mpi[report]', "
            "or use --text"
        ) from error
    return str(get_plotlyjs())


def page(runs: Sequence[Run], now: datetime) -> str:
    """The whole file. UsageError if Plotly is not installed."""
    charts, library = charts_of(runs), plotly()
    figures = plots(runs, charts)
    style = swatch_styles() + (HERE / "page.css").read_text(encoding="utf-8")
    script = f'(() => {{\n"use strict";\n{(HERE / "page.js").read_text(encoding="utf-8")}}})();\n'
    about = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy(script, library)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content=f"zero_mpi {__version__}"),
        tag("title", safe(", ".join(run.name for run in runs)), " - zero_mpi report"),
        tag("link", rel="icon", href=ICON),
        f"<style>{style}</style>",
    )
    main = tag("main", *sections(runs, charts, figures))
    packed = base64.b64encode(gzip.compress(library.encode(), mtime=0)).decode()
    body = tag(
        "body",
        tag("div", head(runs), main, footer(runs, now), class_="wrap"),
        f'<script type="application/json" id="data">{as_json(figures)}</script>\n',
        f'<script type="text/plain" id="plotly">{packed}</script>\n' if figures else "",
        f"<script>{script}</script>\n",
    )
    return f"<!doctype html>\n{tag('html', about, body, lang='en')}\n"


def policy(*scripts: str) -> str:
    """Nothing may run but these scripts, and nothing may load; the icon is in the page.

    Plotly writes styles of its own while it runs. They can fetch nothing either.
    """
    known = " ".join(map(fingerprint, scripts))
    return (
        f"default-src 'none'; script-src {known}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def fingerprint(text: str) -> str:
    """What a policy calls exactly this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def as_json(found: object) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(found, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


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
        "Time is the sum of step times, without evaluations, checkpoints and pauses. Drag or pinch to zoom, "
        "double click to reset."
    )
    made = f"Made by zero_mpi {safe(__version__)} on {now:%Y-%m-%d %H:%M} UTC."
    return tag("footer", tag("p", rule, " ", rest), tag("p", made))
