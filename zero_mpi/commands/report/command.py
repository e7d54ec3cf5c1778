"""Command `report`: reads the folders of runs and writes a page with a Plotly figure and tables.

Names, settings and events come from untrusted files. So the template makes all characters of a value visible,
cuts long values and escapes them. The page's Content-Security-Policy permits only its two scripts, which it
names by hash, and loads nothing else. The page is written to a temporary file and renamed, so that a browser
never loads an incomplete page.
"""

import base64
import gzip
import hashlib
import html
import json
import math
import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from zero_mpi import __version__
from zero_mpi.cli.parser import Parser
from zero_mpi.cli.text import plural, size, write
from zero_mpi.commands.report.runs import LIMIT, MEMORY, MOST_KEYS, Entry, Run, read_runs
from zero_mpi.errors import import_optional
from zero_mpi.files.atomic import write_output
from zero_mpi.files.foreign import LONGEST_LINE, cut, readable, shown
from zero_mpi.files.open import check_target, refusing
from zero_mpi.launch.world import World
from zero_mpi.launch.world import run as launch

Json = dict[str, Any]
NAME = "report.html"
FULL = 4  # up to FULL runs have LIMIT columns each; more runs share FULL * LIMIT columns
LEAST = 250  # minimum number of columns of a run
# Title of a panel, its curves (number in a record -> name), and the divisor that converts to its unit.
PANELS = (
    ("Loss (nats)", {"loss": "training", "val_loss": "validation"}, 1.0),
    ("Losses of routers", {"balance_loss": "balance", "z_loss": "z"}, 1.0),
    (
        "Load of experts (1: even)",
        {"load_most": "most", "load_least": "least", "load_entropy": "entropy"},
        1.0,
    ),
    ("Gradient norm (before clipping)", {"grad_norm": "gradient norm"}, 1.0),
    ("Learning rate", {"lr": "learning rate"}, 1.0),
    ("Throughput (computed tokens per second, all ranks)", {"tokens_per_second": "tokens/s"}, 1.0),
    ("Seconds per step", {"step_seconds": "step", "wait_seconds": "waiting on rank 0"}, 1.0),
    ("Share of measured peak (%)", {"mfu": "share of peak"}, 0.01),
    ("Memory of the largest rank (MiB)", {MEMORY: "memory"}, float(1 << 20)),
)
MARKED = ("resumed", "stopped", "failed", "lost", "warning", "saved")  # events marked on the strip
SIGNS = {"saved": "diamond", "resumed": "triangle-right", "warning": "triangle-up", "stopped": "square"}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")  # Okabe and Ito, 2008
DASHES = ("solid", "dash", "dot", "dashdot")  # the dash changes once all colours are used
MOST_EVENTS, MOST_MARKS = 200, 300  # per run: most events in the list; most marks of saves, and of others
LONGEST_NAME = 60  # maximum number of characters of a run's name
PANEL, STRIP, GAP = 210, 40, 46  # heights in pixels
PAGE = Path(__file__).parent / "page.html"
SCRIPT = """
const text = (id) => document.getElementById(id).textContent;
const packed = Uint8Array.from(atob(text("plotly")), (letter) => letter.charCodeAt(0));
const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
new Response(unpacked).text().then((source) => {
  const script = document.createElement("script");
  script.textContent = source;
  document.head.append(script);
  const figure = JSON.parse(text("data"));
  Plotly.newPlot("curves", figure.data, figure.layout, {responsive: true, displaylogo: false});
});
"""


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="zero-mpi report",
        description="Write one HTML page with curves, events and settings of runs. It works offline.",
        epilog="Examples:\n\n  zero-mpi report runs/default\n  zero-mpi report runs/a runs/b --out both.html",
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run folder, --out of training")
    add("--out", metavar="FILE", help=f"file to write (default: {NAME} in RUN, or here for several runs)")
    return parser


def command(world: World, arguments: Sequence[str]) -> int:
    """Write the page and print its path. Return the exit status."""
    options = make_parser().parse_args(arguments)
    paths = [Path(path) for path in options.runs]
    runs = read_runs(paths, max(LEAST, LIMIT * FULL // max(FULL, len(paths))))
    default = runs[0].path / NAME if len(runs) == 1 else Path(NAME)
    place = default if options.out is None else Path(options.out)
    check_target("--out", place)
    with refusing("--out", place, "cannot be written"):
        write_output(place, page(runs, datetime.now(UTC)), f"{os.getpid()}.partial")
    write([f"wrote {place} ({size(place.stat().st_size)}): open it in a browser"])
    return 0


main = partial(launch, "report", command, alone=True)


def page(runs: Sequence[Run], now: datetime) -> str:
    """Return the page as text. Raise UsageError if Plotly is not installed."""
    from jinja2 import Environment, StrictUndefined  # slow import, which --help does not need
    from markupsafe import Markup

    def visible(value: object) -> object:
        """Return a value as text for the page, cut, with all characters visible. Markup stays unchanged."""
        return value if isinstance(value, Markup) else readable(cut(str(value), LONGEST_LINE))

    def setting(value: object) -> str:
        return shown(" ".join(map(str, value)) if isinstance(value, list) else value, LONGEST_LINE)

    library = str(import_optional("the page", "report", "plotly.offline").get_plotlyjs())
    data = json.dumps(figure(runs), separators=(",", ":"), allow_nan=False)
    for letter in "<>&":  # so that JSON text cannot close its script element
        data = data.replace(letter, f"\\u{ord(letter):04x}")
    environment = Environment(autoescape=True, finalize=visible, undefined=StrictUndefined)
    return environment.from_string(PAGE.read_text(encoding="utf-8")).render(
        runs=runs,
        now=now,
        version=__version__,
        facts=rows([facts(run) for run in runs]),
        events=[list(newest(run)) for run in runs],
        settings=rows([{name: setting(value) for name, value in run.config.items()} for run in runs]),
        policy=policy(SCRIPT, library),
        script=Markup(SCRIPT),
        data=Markup(data),
        packed=Markup(base64.b64encode(gzip.compress(library.encode(), mtime=0)).decode()),
    )


def policy(*scripts: str) -> str:
    """Return a Content-Security-Policy that permits only our scripts, and inline styles for Plotly."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts)
    sources = " ".join(f"'sha256-{digest}'" for digest in digests)
    rest = "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {sources}; {rest}"


def figure(runs: Sequence[Run]) -> Json:
    """Return the figure: a strip with the events of all runs, and a panel for each entry of PANELS."""
    panels = [panel for panel in PANELS if any(name in run.curves.names for run in runs for name in panel[1])]
    data = [events_trace(run, number) for number, run in enumerate(runs)]
    for place, (_, curves, unit) in enumerate(panels):
        for number, run in enumerate(runs):
            for name, title in curves.items():
                if name in run.curves.names:
                    steps, values = run.curves.points(name)
                    is_sparse = name in ("val_loss", "wait_seconds")
                    data.append({
                        "type": "scatter",
                        "mode": "lines+markers" if is_sparse or len(steps) == 1 else "lines",
                        "x": steps.tolist(),
                        "y": [float(f"{y / unit:.6g}") if math.isfinite(y) else None for y in values],
                        "name": label(f"{run.name}: {title}"),
                        "legendgroup": f"{number}",
                        "showlegend": place == 0,
                        "yaxis": f"y{place + 2}",
                        "line": {**line_of(number), "width": 1 if is_sparse else 1.6},
                        "marker": {"size": 5, "symbol": "circle-open"},
                    })  # fmt: skip
    return {"data": data, "layout": layout(runs, panels)}


def label(text: str) -> str:
    """Return a text as a label for Plotly, which reads labels as HTML."""
    return html.escape(readable(cut(text, LONGEST_NAME)))


def line_of(number: int) -> Json:
    return {"color": COLOURS[number % len(COLOURS)], "dash": DASHES[number // len(COLOURS) % len(DASHES)]}


def events_trace(run: Run, number: int) -> Json:
    """Return the trace that marks a run's events."""
    events = [event for event in run.events if event["event"] in MARKED and event.count("step") is not None]
    marks = [event for event in events if event["event"] != "saved"][-MOST_MARKS:]
    marks += [event for event in events if event["event"] == "saved"][-MOST_MARKS:]
    symbols = [SIGNS.get(event["event"], "x") for event in marks]
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [event.count("step") for event in marks],
        "y": [-number] * len(marks),
        "text": [label(about(event)) for event in marks],
        "hovertemplate": "step %{x}: %{text}<extra></extra>",
        "marker": {"symbol": symbols, "size": 9, "color": line_of(number)["color"]},
        "legendgroup": f"{number}",
        "showlegend": False,
        "yaxis": "y",
    }


def layout(runs: Sequence[Run], panels: Sequence[Any]) -> Json:
    """Return the layout: the strip and the panels in one column, with a common axis of steps."""
    strip = STRIP + 14 * (len(runs) - 1)
    full = strip + len(panels) * (PANEL + GAP)
    grid = {"gridcolor": "rgba(128,136,148,0.22)", "zeroline": False}
    axes: Json = {
        "yaxis": {"domain": [1 - strip / full, 1], "visible": False, "range": [0.6 - len(runs), 0.6]}
    }
    titles = []
    for place, (title, curves, _) in enumerate(panels):
        top = 1 - (strip + GAP + place * (PANEL + GAP)) / full
        mode = "normal" if {"loss", "grad_norm"} & curves.keys() else "tozero"
        axes[f"yaxis{place + 2}"] = grid | {"domain": [max(0.0, top - PANEL / full), top], "rangemode": mode}
        anchor = {"xref": "paper", "x": 0, "xanchor": "left", "yref": "paper", "y": top, "yanchor": "bottom"}
        titles.append({"text": f"<b>{title}</b>", "showarrow": False, **anchor})
    scales = [
        {"label": f"{kind} loss", "method": "relayout", "args": ["yaxis2.type", kind]}
        for kind in ("linear", "log")
    ]
    corner = {"x": 1, "xanchor": "right", "y": 1 - (strip + GAP) / full, "yanchor": "bottom", "pad": {"b": 4}}
    return {
        **axes,
        **dict.fromkeys(("paper_bgcolor", "plot_bgcolor"), "rgba(0,0,0,0)"),
        "height": full + 150,
        "margin": {"t": 90, "b": 50, "l": 60, "r": 10},
        "xaxis": grid | {"anchor": f"y{len(panels) + 1}", "title": {"text": "step"}, "showspikes": True},
        "hovermode": "x unified" if len(runs) == 1 else "closest",
        "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
        "annotations": titles,
        "updatemenus": [corner | {"type": "buttons", "direction": "right", "buttons": scales}][: len(panels)],
        "font": {"color": "#7a8290"},
    }


def rows(columns: Sequence[dict[str, str]]) -> list[tuple[str, bool, list[str]]]:
    """Return rows (name, whether the runs differ, value of each run) for every name in any run."""
    names = dict.fromkeys(name for column in columns for name in column)
    table = [(name, [column.get(name, "") for column in columns]) for name in names]
    return [(name, len(set(values)) > 1, values) for name, values in table]


def facts(run: Run) -> dict[str, str]:
    """Return the state of a run, and the facts in the event of its newest start."""
    reason, steps = run.status.text("reason"), run.status.count("steps") or run.config.count("steps")
    state = (run.state or "unknown: there is no status.json") + (f": {reason}" if reason else "")
    started = {
        name: shown(value, LONGEST_LINE)
        for name, value in islice(run.started.items(), MOST_KEYS)
        if isinstance(value, str | int) and name not in ("time", "event", "step")
    }
    return {"state": state, "step": f"{run.step:,}" + (f" of {steps:,}" if steps else ""), **started}


def newest(run: Run) -> Iterator[tuple[str, str, str]]:
    """Yield (time, step, description) of the most recent events, the newest first."""
    for event in [*run.events][: -MOST_EVENTS - 1 : -1]:
        time = event.moment("time")
        yield f"{time:%Y-%m-%d %H:%M:%S}" if time else "", f"{event.count('step') or 0:,}", about(event)


def about(event: Entry) -> str:
    """Return the description of an event in one line."""
    name, folder = event["event"], event.text("folder")
    if name == "started" and (ranks := event.count("ranks")):
        return f"started on {plural(ranks, 'rank')}"
    if name in ("saved", "resumed"):
        suffix = f" of {plural(ranks, 'rank')}" if (ranks := event.count("from_ranks")) else ""
        return f"{name} {'from ' if name == 'resumed' else ''}{folder or 'a checkpoint'}{suffix}"
    if name == "sample":
        return f"sample: {event.text('prompt')}{event.text('text').removeprefix(event.text('prompt'))}"
    detail = event.text("text") or event.text("reason")
    return f"{name}: {detail}" if detail else str(name)
