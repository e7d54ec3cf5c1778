"""The figures of a page as Plotly's data: traces, a layout, and where points lie on each axis.

All charts are one figure, one below the other above a common axis, so that a zoom, the line under the pointer
and the legend are those of all of them. On top is a strip with the moments of the runs. What depends on the
reader (the axis, smoothing, light or dark) the script sets, by what stands in a trace's `meta`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from zero_mpi.cli.text import size
from zero_mpi.report.charts import Chart
from zero_mpi.report.runs import Run
from zero_mpi.report.traces import Json, Scale, class_of, curve_traces, label, mark_traces, rounded, scale_of

AXES = {"step": "Steps", "seconds": "Time", "tokens": "Tokens"}
CLOCK = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
TALL, FLAT, STRIP = 280, 110, 28  # pixels: the first chart, the others, and the moments of a run
GAP, TOP, BOTTOM, LEFT, RIGHT = 38, 4, 44, 62, 10  # pixels between charts, and around all of them
GREY = "rgba(128,136,148,0.22)"  # of lines behind curves, on both grounds
AXIS: Json = {"gridcolor": GREY, "zeroline": False}
SPIKE = {"showspikes": True, "spikemode": "across", "spikethickness": 1, "spikedash": "solid"}
BARS, MOST_BARS = 220, 256  # pixels of the memory by rank, and bars of a run


def plots(runs: Sequence[Run], charts: Sequence[Chart]) -> dict[str, Json]:
    """The figures of a page by the id of their element; one without content is left out."""
    found = {"curves": curves(runs, charts) if charts else None, "memory": memory(runs)}
    return {name: plot for name, plot in found.items() if plot}


def curves(runs: Sequence[Run], charts: Sequence[Chart]) -> Json:
    """The figure of all charts. `places` are lists of where points lie, which traces name by number."""
    traces: list[Json] = []
    scales = [scale_of(chart, runs) for chart in charts]
    for run in runs:
        for (axis, chart), scale in zip(named(charts), scales, strict=True):
            found = (trace for series in chart.series for trace in curve_traces(run, series, scale))
            traces += [{**trace, "yaxis": axis.replace("axis", "")} for trace in found]
        traces += mark_traces(run)
    numbers: dict[tuple[Sequence[Any], ...], int] = {}
    for trace in traces:
        key = tuple(tuple(trace["meta"]["x"][axis]) for axis in AXES)
        trace["meta"]["x"] = numbers.setdefault(key, len(numbers))
    places = [dict(zip(AXES, key, strict=True)) for key in numbers]
    axes = {"step": "step", "seconds": f"time, {in_clock(places)}", "tokens": "tokens"}
    return {"traces": traces, "layout": layout(runs, charts, scales), "places": places, "axes": axes}


def named(charts: Sequence[Chart]) -> list[tuple[str, Chart]]:
    """(name of its upright axis, chart); the first axis is that of the strip above them."""
    return [(f"yaxis{place + 2}", chart) for place, chart in enumerate(charts)]


def in_clock(places: Sequence[Json]) -> str:
    """Turn seconds into the unit that fits the longest run; its name."""
    longest = max((here["seconds"][-1] or 0.0 for here in places if here["seconds"]), default=0.0)
    unit, name = next((one for one in CLOCK if longest >= 2 * one[0]), CLOCK[-1])
    for here in places:
        here["seconds"] = [None if value is None else rounded(value / unit, 6) for value in here["seconds"]]
    return name


def layout(runs: Sequence[Run], charts: Sequence[Chart], scales: Sequence[Scale]) -> Json:
    """Where each chart is, and what stands beside it."""
    heights = [STRIP * len(runs), TALL, *[FLAT] * (len(charts) - 1)]
    ends = [end + GAP * place for place, end in enumerate(accumulate(heights))]
    whole = ends[-1]
    strip, *domains = (
        [1 - end / whole, min(1.0, 1 - (end - height) / whole)]
        for end, height in zip(ends, heights, strict=True)
    )
    upright = {
        axis: AXIS | {
            "domain": domain, "rangemode": "tozero" if chart.from_zero else "normal",
            "ticksuffix": scale.suffix, "nticks": 8 if chart is charts[0] else 4,
        }
        for (axis, chart), scale, domain in zip(named(charts), scales, domains, strict=True)
    }  # fmt: skip
    return {
        **common(whole + TOP + BOTTOM),
        "hovermode": "x unified",
        "hoversubplots": "axis" if len(runs) == 1 else "single",  # all values of several runs hide the curves
        "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0, "tracegroupgap": 4},
        "xaxis": AXIS | SPIKE | {"anchor": f"y{len(charts) + 1}", "hoverformat": ",.9~r"},
        "yaxis": {
            "domain": strip, "visible": False, "fixedrange": True, "range": [0.2 - len(runs), 0.4],
        },
        **upright,
        "annotations": [title(chart, top) for chart, (_, top) in zip(charts, domains, strict=True)],
    }  # fmt: skip


def common(height: int) -> Json:
    """What all figures look like."""
    margin = {"t": TOP, "b": BOTTOM, "l": LEFT, "r": RIGHT}
    grounds = dict.fromkeys(("paper_bgcolor", "plot_bgcolor"), "rgba(0,0,0,0)")
    return {"height": height, "margin": margin, "uirevision": "kept", **grounds}


def title(chart: Chart, top: float) -> Json:
    """A chart's name and unit, above it."""
    return {
        "text": f"<b>{chart.title}</b> {chart.unit}", "hovertext": chart.about, "showarrow": False,
        "xref": "paper", "x": 0, "xanchor": "left", "xshift": 8 - LEFT,
        "yref": "paper", "y": top, "yanchor": "bottom",
    }  # fmt: skip


def memory(runs: Sequence[Run]) -> Json | None:
    """A bar for each rank of the latest jobs, or the largest of neighbours; None if no run has several."""
    traces = [bars(run) for run in runs if len(run.memory) > 1]
    axes: dict[str, Any] = {
        "bargap": 0.5,
        "xaxis": AXIS | {"title": {"text": "rank"}},
        "yaxis": {"ticksuffix": " MiB", "gridcolor": GREY, "rangemode": "tozero", "nticks": 5},
    }
    return {"traces": traces, "layout": common(BARS) | axes} if traces else None


def bars(run: Run) -> Json:
    """The memory of a run's ranks."""
    group = -(-len(run.memory) // MOST_BARS)
    groups = {start: run.memory[start : start + group] for start in range(0, len(run.memory), group)}
    ends = {
        start: f" {start}" if len(of) == 1 else f"s {start} to {start + len(of) - 1}"
        for start, of in groups.items()
    }
    return {
        "type": "bar",
        "name": label(run.name),
        "x": list(groups),
        "y": [max(of) / 2**20 for of in groups.values()],
        "text": [f"rank{ends[start]}: {size(max(of))}" for start, of in groups.items()],
        "textposition": "none",
        "hovertemplate": "%{text}<extra></extra>",
        "showlegend": False,
        "meta": {"colour": class_of(run.number)},
    }
