"""The page: one HTML file with its style, its script, Plotly and its numbers inside, which loads nothing.

Names, settings, samples and reasons come from files that anybody may have written: whatever the template puts
into the page is made visible, cut and escaped. The page's Content-Security-Policy lets no script run but its
two, by their hashes, and lets nothing be fetched: a hostile name or sample could not act even if it were not
escaped. Plotly is packed, which makes the page 2 MB instead of 5; the script unpacks it.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from zero_mpi import __version__
from zero_mpi.cli.text import size
from zero_mpi.errors import import_optional
from zero_mpi.files.foreign import LONGEST_LINE, cut, readable, shown
from zero_mpi.report import sections
from zero_mpi.report.charts import charts_of
from zero_mpi.report.figures import figures, state_line
from zero_mpi.report.plots import AXES, named, plots
from zero_mpi.report.runs import Run
from zero_mpi.report.traces import class_of

HERE = Path(__file__).parent


def visible(text: object, most: int = LONGEST_LINE) -> object:
    """Text as a page may hold it, in at most so many letters: all can be seen; what is markup stays."""
    return text if isinstance(text, Markup) else readable(cut(str(text), most))


ENVIRONMENT = Environment(
    autoescape=True, finalize=visible, undefined=StrictUndefined, keep_trailing_newline=True
)
ENVIRONMENT.filters |= {
    "shown": shown,
    "size": size,
    "visible": lambda text, most: Markup.escape(visible(text, most)),
}
ENVIRONMENT.globals |= {
    "class_of": class_of,
    "figures": figures,
    "state_line": state_line,
    "version": __version__,
    "whereabouts": sections.whereabouts,
    "memory_of": sections.memory_of,
}


def page(runs: Sequence[Run], now: datetime) -> str:
    """The whole file. UsageError if Plotly is not installed."""
    offline = import_optional("the page", "report", "plotly.offline", otherwise=", or use --text")
    charts, library = charts_of(runs), str(offline.get_plotlyjs())
    drawn, history = plots(runs, charts), sections.history(runs)
    script = f'(() => {{\n"use strict";\n{read("page.js")}}})();\n'
    return ENVIRONMENT.from_string(read("page.html")).render(
        runs=runs,
        now=now,
        charts=named(charts),
        axes=AXES,
        plots=drawn,
        side_by_side=sections.side_by_side(runs),
        last_values=[*sections.last_values(runs, charts)],
        checkpoints=[*sections.checkpoints(runs)],
        samples=[*sections.samples(runs)],
        history=history[: sections.MOST_EVENTS],
        events_left_out=len(history[sections.MOST_EVENTS :]),
        settings=sections.settings(runs),
        policy=policy(script, library),
        style=Markup(read("page.css")),
        script=Markup(script),
        data=Markup(as_json(drawn)),
        packed=Markup(base64.b64encode(gzip.compress(library.encode(), mtime=0)).decode()),
    )


def read(name: str) -> str:
    """A file that belongs to the page."""
    return (HERE / name).read_text(encoding="utf-8")


def policy(*scripts: str) -> str:
    """Nothing may run but these scripts, and nothing may load; the icon is in the page.

    Plotly writes styles of its own while it runs. They can fetch nothing either.
    """
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts)
    known = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {known}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def as_json(found: object) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(found, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
