"""What the page shows above and below its charts, as rows; `page.html` lays them out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import product

from zero_mpi.cli.text import elapsed, size
from zero_mpi.config.settings import FIELDS, Config
from zero_mpi.files.foreign import LONGEST_LINE, shown
from zero_mpi.report.charts import Chart, in_full, written
from zero_mpi.report.figures import Figure, figures
from zero_mpi.report.runs import Checkpoint, Run

MOST_EVENTS, MOST_SAMPLES, MOST_CHECKPOINTS = 200, 3, 100  # of a run


def whereabouts(run: Run) -> str:
    """Where the run is, and when it was heard of."""
    times = {name: run.status.moment(name) for name in ("started", "updated")}
    told = [f"{name} {when:%Y-%m-%d %H:%M} UTC" for name, when in times.items() if when]
    return ", ".join([str(run.path), *told])


def side_by_side(runs: Sequence[Run]) -> Iterator[tuple[str, list[Figure | None]]]:
    """(name, the figure of each run) of all that at least one of them has."""
    found = [{one.name: one for one in figures(run)} for run in runs]
    names = dict.fromkeys(name for of in found for name in of)
    return ((name, [of.get(name) for of in found]) for name in names)


def last_values(runs: Sequence[Run], charts: Sequence[Chart]) -> Iterator[tuple[str, Run, list[str]]]:
    """(curve, run, last and least and greatest): for those who cannot see curves, and for copying."""
    for chart in charts:
        for series, run in product(chart.series, runs):
            if series.key in run.metrics.last:
                values = (run.metrics.last[series.key], *run.metrics.curves[series.key].extent)
                name = f"{chart.title}, {series.title}" if len(chart.series) > 1 else chart.title
                yield name, run, [written(value, chart.form) for value in values]


def memory_of(run: Run) -> str:
    """The span over the ranks of the latest job, of the last time that their memory was looked at."""
    span = f"{len(run.memory):,} ranks, {size(int(min(run.memory)))} to {size(int(max(run.memory)))}"
    return f"{span}, after step {run.metrics.memory_step:,}"


def checkpoints(runs: Sequence[Run]) -> Iterator[tuple[Run, Checkpoint, str, list[str], list[Run]]]:
    """(run, what is in a folder, how long it took to write, notes, other runs with the same bits)."""
    digests = [{one.digest for one in run.checkpoints} - {""} for run in runs]
    for run in runs:
        saved = {one.text("folder"): one.seconds("seconds") for one in run.events if one["event"] == "saved"}
        for one in run.checkpoints[-MOST_CHECKPOINTS:]:
            took = saved.get(one.folder)
            notes = ["latest"] * one.is_latest + ["best"] * one.is_best + [one.problem] * bool(one.problem)
            alike = [by for by, has in zip(runs, digests, strict=True) if by is not run and one.digest in has]
            yield run, one, "" if took is None else elapsed(took), notes, alike


def samples(runs: Sequence[Run]) -> Iterator[tuple[Run, str, str, str]]:
    """(run, step, prompt, what was written after it) of the last texts of each run."""
    for run in runs:
        found = [event for event in run.events if event["event"] == "sample" and event.text("text")]
        for event in found[-MOST_SAMPLES:][::-1]:
            prompt = event.text("prompt")
            yield run, f"{event.count('step') or 0:,}", prompt, event.text("text").removeprefix(prompt)


def history(runs: Sequence[Run]) -> list[tuple[datetime | None, Run, str, str, str]]:
    """(time, run, step, event, what happened), the newest first."""
    found = [
        (event.moment("time"), run, event)
        for run in reversed(runs)
        for event in reversed(run.events)
        if event["event"] != "sample"
    ]
    found.sort(key=lambda one: one[0].timestamp() if one[0] else 0.0, reverse=True)
    return [
        (when, run, f"{event.count('step') or 0:,}", event["event"], in_full(event))
        for when, run, event in found
    ]


def settings(runs: Sequence[Run]) -> list[tuple[str, bool, list[str]]]:
    """(setting, whether it is marked: not the default, or not the same in all runs; their values)."""
    known = [name for name in FIELDS if any(name in run.config for run in runs)]
    found = []
    for name in [*known, *sorted({name for run in runs for name in run.config} - set(known))]:
        values = [run.config.get(name) for run in runs]
        differs = values.count(values[0]) < len(runs) if len(runs) > 1 else not is_default(name, values[0])
        found.append((name, differs, [*map(as_text, values)]))
    return found


def is_default(name: str, value: object) -> bool:
    """Whether a setting is what it is when nobody says anything."""
    return name in FIELDS and bool(value == getattr(Config(), name))


def as_text(value: object) -> str:
    """A setting for people."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return " ".join(value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else shown(value, LONGEST_LINE)
