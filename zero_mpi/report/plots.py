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
from zero_mpi.report import colours
from zero_mpi.report.charts import Chart
from zero_mpi.report.runs import Run
from zero_mpi.report.traces import Json, curve_traces, label, mark_traces, rounded, scale_of

AXES = {"step": "Steps", "seconds": "Time", "tokens": "Tokens"}
CLOCK = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
TALL, FLAT, STRIP = 280, 110, 28  # pixels: the first chart, the others, and the moments of a run
GAP, TOP, BOTTOM, LEFT, RIGHT = 38, 4, 44, 62, 10  # pixels between charts, and around all of them
GREY = "rgba(128,136,148,0.22)"  # of lines behind curves, on both grounds
BARS, MOST_BARS = 220, 256  # pixels of the memory by rank, and bars of a run


def plots(runs: Sequence[Run], charts: Sequence[Chart]) -> dict[str, Json]:
    """The figures of a page by the id of their element; one without content is left out."""
    found = {"curves": curves(runs, charts) if charts else None, "memory": memory(runs)}
    return {name: plot for name, plot in found.items() if plot}


def curves(runs: Sequence[Run], charts: Sequence[Chart]) -> Json:
    """The figure of all charts. `places` are lists of where points lie, which traces name by number."""
    traces: list[Json] = []
    for number, run in enumerate(runs):
        for axis, chart in named(charts):
            scale = scale_of(chart, runs)
            for series in chart.series:
                found = curve_traces(run, number, len(runs), series, scale)
                traces += [{**trace, "yaxis": axis.replace("axis", "")} for trace in found]
        traces += mark_traces(run, number, len(runs))
    places = [dict(zip(AXES, key, strict=True)) for key in numbered(traces)]
    axes = {"step": "step", "seconds": f"time, {in_clock(places)}", "tokens": "tokens"}
    return {"traces": traces, "layout": layout(runs, charts), "places": places, "axes": axes}


def numbered(traces: Sequence[Json]) -> list[tuple[Sequence[Any], ...]]:
    """The different lists of places that traces have; each trace gets the number of its own instead."""
    found: dict[tuple[Sequence[Any], ...], int] = {}
    for trace in traces:
        key = tuple(tuple(trace["meta"]["x"][axis]) for axis in AXES)
        trace["meta"]["x"] = found.setdefault(key, len(found))
    return list(found)


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


def layout(runs: Sequence[Run], charts: Sequence[Chart]) -> Json:
    """Where each chart is, and what stands beside it."""
    heights = [STRIP * len(runs), TALL, *[FLAT] * (len(charts) - 1)]
    ends = [end + GAP * place for place, end in enumerate(accumulate(heights))]
    whole = ends[-1]
    domains = [
        [1 - end / whole, min(1.0, 1 - (end - height) / whole)]
        for end, height in zip(ends, heights, strict=True)
    ]
    made: Json = {
        **common(whole + TOP + BOTTOM),
        "hovermode": "x unified",
        "hoversubplots": "axis" if len(runs) == 1 else "single",  # all values of several runs hide the curves
        "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0, "tracegroupgap": 4},
        "xaxis": {
            "anchor": f"y{len(charts) + 1}",
            "gridcolor": GREY,
            "zeroline": False,
            "hoverformat": ",.9~r",
            "showspikes": True,
            "spikemode": "across",
            "spikethickness": 1,
            "spikedash": "solid",
        },
        "yaxis": {
            "domain": domains[0], "visible": False, "fixedrange": True, "range": [0.2 - len(runs), 0.4],
        },
        "annotations": [],
    }  # fmt: skip
    for (axis, chart), domain in zip(named(charts), domains[1:], strict=True):
        made[axis] = {
            "domain": domain,
            "rangemode": "tozero" if chart.from_zero else "normal",
            "ticksuffix": scale_of(chart, runs).suffix,
            "nticks": 8 if chart is charts[0] else 4,
            "gridcolor": GREY,
            "zeroline": False,
        }
        made["annotations"].append(title(chart, domain[1]))
    return made


def common(height: int) -> Json:
    """What all figures look like."""
    return {
        "height": height,
        "margin": {"t": TOP, "b": BOTTOM, "l": LEFT, "r": RIGHT},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "uirevision": "kept",
    }


def title(chart: Chart, top: float) -> Json:
    """A chart's name and unit, above it."""
    return {
        "text": f"<b>{chart.title}</b> {chart.unit}",
        "hovertext": chart.about,
        "showarrow": False,
        "xref": "paper",
        "yref": "paper",
        "x": 0,
        "y": top,
        "xanchor": "left",
        "yanchor": "bottom",
        "xshift": 8 - LEFT,
    }


def memory(runs: Sequence[Run]) -> Json | None:
    """A bar for each rank of the latest jobs, or the largest of neighbours; None if no run has several."""
    shown = [(number, run) for number, run in enumerate(runs) if len(run.memory) > 1]
    traces: list[Json] = []
    for number, run in shown:
        group = -(-len(run.memory) // MOST_BARS)
        starts = range(0, len(run.memory), group)
        most = [max(run.memory[start : start + group]) for start in starts]
        last = [min(len(run.memory), start + group) - 1 for start in starts]
        ranks = [f"rank {a}" if a == b else f"ranks {a} to {b}" for a, b in zip(starts, last, strict=True)]
        traces.append(
            {
                "type": "bar",
                "name": label(run.name),
                "x": list(starts),
                "y": [value / 2**20 for value in most],
                "text": [f"{rank}: {size(int(value))}" for rank, value in zip(ranks, most, strict=True)],
                "textposition": "none",
                "hovertemplate": "%{text}<extra></extra>",
                "showlegend": False,
                "meta": {"colour": colours.of_run(number)},
            }
        )
    axes: dict[str, Any] = {
        "bargap": 0.5,
        "xaxis": {"title": {"text": "rank"}, "gridcolor": GREY, "zeroline": False},
        "yaxis": {"ticksuffix": " MiB", "gridcolor": GREY, "rangemode": "tozero", "nticks": 5},
    }
    return {"traces": traces, "layout": common(BARS) | axes} if traces else None
