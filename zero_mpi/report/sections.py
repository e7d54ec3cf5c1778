"""The page below the charts: last values, memory by rank, checkpoints, samples, history, configuration.

Each part is a function of the runs that gives markup, or nothing where there is nothing to show.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import MISSING
from typing import Any

from zero_mpi.cli.text import elapsed, size
from zero_mpi.config.defaults import STEPS
from zero_mpi.config.settings import FIELDS
from zero_mpi.files.foreign import LONGEST_LINE
from zero_mpi.files.foreign import shown as shown_text
from zero_mpi.report.charts import Chart, about, written
from zero_mpi.report.columns import is_number
from zero_mpi.report.head import label, swatch
from zero_mpi.report.markup import row, safe, section, table, tag
from zero_mpi.report.plots import AXES, named
from zero_mpi.report.runs import Event, Run, integer, moment, text

MOST_EVENTS, MOST_SAMPLES, MOST_CHECKPOINTS = 200, 3, 100  # of a run
MOST_TEXT = 20_000  # letters of a sample


def sections(runs: Sequence[Run], charts: Sequence[Chart], figures: Container[str]) -> Iterator[str]:
    """All of them; one without content is left out."""
    if charts:
        yield section("curves", "Curves", controls(charts) + plot("curves"))
    yield section("values", "Last values", last_values(runs, charts))
    if "memory" in figures:
        spans = "".join(memory_of(run, number) for number, run in enumerate(runs))
        yield section("ranks", "Memory by rank", plot("memory") + spans)
    yield section("checkpoints", "Checkpoints", checkpoints(runs))
    yield section("samples", "Samples", "".join(samples(runs)))
    yield section("history", "History", history(runs))
    yield section("settings", "Configuration", settings(runs))


def plot(name: str) -> str:
    """The place of a figure."""
    keys = f"{name}: arrow keys move, plus and minus zoom, 0 resets"
    return tag("div", id=f"{name}-plot", class_="plot", tabindex=0, role="group", aria_label=keys) + tag(
        "noscript", tag("p", "Curves need JavaScript; the numbers are below.", class_="note")
    )


def controls(charts: Sequence[Chart]) -> str:
    """Switches: the axis of all charts, logarithmic scales, smoothing."""
    axes = [
        tag("button", name, type="button", data_axis=axis, aria_pressed=str(axis == "step").lower())
        for axis, name in AXES.items()
    ]
    logs = [
        tag("button", f"log {chart.title.lower()}", type="button", data_log=axis, aria_pressed="false")
        for axis, chart in named(charts)
        if chart.log
    ]
    slider = tag("input", id="smooth", type="range", min=0, max=100, value=0)
    return tag(
        "div",
        tag("span", *axes, class_="choice", role="group", aria_label="Axis"),
        *logs,
        tag("label", "Smooth ", slider, class_="slide"),
        tag("button", "Reset zoom", type="button", id="reset"),
        class_="controls needs-js",
    )


def last_values(runs: Sequence[Run], charts: Sequence[Chart]) -> str:
    """Every curve in numbers: for those who cannot see curves, and for copying."""
    rows = []
    for chart in charts:
        for series in chart.series:
            for number, run in enumerate(runs):
                if series.key in run.metrics.last:
                    numbers = (run.metrics.last[series.key], *run.metrics.curves[series.key].extent)
                    name, whose = safe(series_title(chart, series.title)), label(runs, number)
                    cells = [written(value, chart.form) for value in numbers]
                    rows.append(row(name, *([whose] * (len(runs) > 1)), *cells))
    head = ["Curve", *(["Run"] * (len(runs) > 1)), "Last", "Least", "Greatest"]
    kind = "numbers two" if len(runs) > 1 else "numbers"
    return table(head, rows, "Last values", class_=kind) if rows else ""


def series_title(chart: Chart, title: str) -> str:
    """What a curve is called outside its chart."""
    return f"{chart.title}, {title}" if len(chart.series) > 1 else chart.title


def memory_of(run: Run, number: int) -> str:
    """The span over the ranks of the latest job, of the last time that their memory was looked at."""
    values = [int(value) for value in run.memory]
    if len(values) < 2:
        return ""
    span = f"{len(values):,} ranks, {size(min(values))} to {size(max(values))}"
    after = f", after step {run.metrics.memory_step:,}"
    return tag("p", swatch(number), safe(run.name), ": ", span, after, class_="note")


def checkpoints(runs: Sequence[Run]) -> str:
    """What is in the folders; the same digest in two runs means the same bits."""
    owners: dict[str, list[int]] = defaultdict(list)
    for number, run in enumerate(runs):
        for digest in {one.digest for one in run.checkpoints} - {""}:
            owners[digest].append(number)
    rows = []
    for number, run in enumerate(runs):
        took = {
            text(event.get("folder")): event.get("seconds")
            for event in run.events
            if event["event"] == "saved"
        }
        for one in run.checkpoints[-MOST_CHECKPOINTS:]:
            alike = [label(runs, other) for other in owners[one.digest] if other != number]
            links = ["latest"] * one.is_latest + ["best"] * one.is_best
            notes = [*links, *filter(None, [safe(one.problem)])]
            notes += [f"same bits as {name}" for name in alike]
            rows.append(
                row(
                    tag("code", safe(one.folder)),
                    *([label(runs, number)] * (len(runs) > 1)),
                    tag("code", safe(one.digest), class_="hash", title=shown_text(one.digest)),
                    size(one.nbytes) if one.nbytes else "",
                    seconds_of(took.get(one.folder)),
                    ", ".join(notes),
                )
            )
    head = ["Folder", *(["Run"] * (len(runs) > 1)), "Digest of the state", "Size", "Written in", ""]
    return table(head, rows, "Checkpoints", class_="checkpoints") if rows else ""


def seconds_of(value: Any) -> str:
    """A time, if it is one."""
    return elapsed(float(value)) if is_number(value) and value >= 0 else ""


def samples(runs: Sequence[Run]) -> Iterator[str]:
    """The last texts of each run."""
    for number, run in enumerate(runs):
        found = [event for event in run.events if event["event"] == "sample" and text(event.get("text"))]
        for event in found[-MOST_SAMPLES:][::-1]:
            prompt = text(event.get("prompt"))
            written = text(event["text"]).removeprefix(prompt)
            whose = f"{label(runs, number)}, " if len(runs) > 1 else ""
            yield tag(
                "figure",
                tag("figcaption", whose, f"after step {integer(event.get('step')) or 0:,}"),
                tag("pre", tag("b", safe(prompt)), safe(written, MOST_TEXT), dir="auto"),
                class_="sample",
            )


def history(runs: Sequence[Run]) -> str:
    """What happened, the newest first."""
    found = [
        (moment(event.get("time")), number, place, event)
        for number, run in enumerate(runs)
        for place, event in enumerate(run.events)
        if event["event"] != "sample"
    ]
    found.sort(key=lambda one: (one[0].timestamp() if one[0] else 0.0, one[1], one[2]), reverse=True)
    rows = [
        row(
            f"{tag('time', f'{when:%Y-%m-%d}')} {tag('time', f'{when:%H:%M:%S}')}" if when else "",
            *([label(runs, number)] * (len(runs) > 1)),
            f"{integer(event.get('step')) or 0:,}",
            tag("span", safe(told(event)), class_=f"event {shown_text(event['event'], 20)}"),
        )
        for when, number, _, event in found[:MOST_EVENTS]
    ]
    head = ["Time (UTC)", *(["Run"] * (len(runs) > 1)), "Step", "What"]
    left = len(found) - len(rows)
    more = tag("p", f"and {left:,} before these, in events.jsonl", class_="note") if left else ""
    return table(head, rows, "History", class_="history") + more if rows else ""


def told(event: Event) -> str:
    """An event with what belongs to it."""
    said = about(event)
    if event["event"] == "saved":
        nbytes, took = integer(event.get("bytes")), seconds_of(event.get("seconds"))
        said += f", {size(nbytes)}" if nbytes else ""
        said += f" in {took}" if took else ""
    if event["event"] == "started":
        rest = [text(event.get(name)) for name in ("strategy", "transport", "device", "version")]
        said = ", ".join(filter(None, [said, *rest]))
    return said


def settings(runs: Sequence[Run]) -> str:
    """All settings: of one run those marked that are not the default, of several those that differ."""
    keys = [name for name in FIELDS if any(name in run.config for run in runs)]
    keys += sorted({name for run in runs for name in run.config} - set(keys))
    rows, marked = [], 0
    for name in keys:
        values = [run.config.get(name) for run in runs]
        differs = any(value != values[0] for value in values)
        stands_out = differs if len(runs) > 1 else not is_default(name, values[0])
        marked += stands_out
        cells = [tag("code", safe(as_text(value))) for value in values]
        rows.append(row(tag("code", safe(name)), *cells, kind="differs" if stands_out else "same"))
    if not rows:
        return ""
    heads = [label(runs, number) for number in range(len(runs))] if len(runs) > 1 else ["Value"]
    what = "differ between the runs" if len(runs) > 1 else "are not the default"
    box = tag("input", type="checkbox", id="only-differs")
    return "".join(
        [
            tag("p", f"{marked} of {len(rows)} {what}; they are marked.", class_="note"),
            tag("label", box, " only these", class_="needs-js only"),
            table(["Setting", *heads], rows, "Configuration", class_="settings", id="settings-table"),
        ]
    )


def is_default(name: str, value: object) -> bool:
    """Whether a setting is what it is when nobody says anything."""
    known = FIELDS.get(name)
    if known is None:
        return False
    default = known.default_factory() if known.default_factory is not MISSING else known.default
    return bool(value == STEPS.get(name, default))


def as_text(value: object) -> str:
    """A setting for people."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return " ".join(value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else shown_text(value, LONGEST_LINE)
