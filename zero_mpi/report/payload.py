"""The numbers that the page's script draws, as JSON inside the page.

Numbers have as many digits as a picture needs; all of them are in metrics.jsonl. Arrays run over the columns
of a run (`metrics`), so what is at the same place belongs to the same steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from zero_mpi.report.charts import Chart, marks, points
from zero_mpi.report.markup import visible
from zero_mpi.report.metrics import Floats
from zero_mpi.report.run_folder import Run
from zero_mpi.report.svg import colour

DIGITS, EXACT = 5, 16  # of values, and of steps


def payload(runs: Sequence[Run], charts: Sequence[Chart]) -> str:
    """JSON that cannot end the element it stands in."""
    found = {
        "charts": [about_chart(chart) for chart in charts],
        "runs": [about_run(run, number, charts) for number, run in enumerate(runs)],
    }
    text = json.dumps(found, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def about_chart(chart: Chart) -> dict[str, Any]:
    """What the script must know of a chart."""
    series = [{"key": one.key, "title": one.title, "dots": one.dots} for one in chart.series]
    return {"id": chart.id, "form": chart.form, "fromZero": chart.from_zero, "series": series}


def about_run(run: Run, number: int, charts: Sequence[Chart]) -> dict[str, Any]:
    """A run's axes, curves and marks."""
    curves = {series.key: curve(run, series.key) for chart in charts for series in chart.series}
    return {
        "name": visible(run.name),
        "number": number,
        "colour": colour(number),
        "step": short(axis(run, "step"), EXACT),
        "seconds": short(axis(run, "seconds"), 9) or None,
        "tokens": short(axis(run, "tokens"), EXACT) or None,
        "curves": {key: found for key, found in curves.items() if found is not None},
        "marks": [[mark.step, mark.kind, visible(mark.about)] for mark in marks(run)],
    }


def axis(run: Run, name: str) -> Floats:
    """Where each column ends on an axis; empty if the records do not say, else never falling."""
    found = run.metrics.at[name]["greatest"][run.metrics.used]
    fine = np.isfinite(found)
    return np.maximum.accumulate(np.where(fine, found, 0.0)) if fine.any() else np.zeros(0)


def curve(run: Run, key: str) -> dict[str, Any] | None:
    """A curve of the script.

    m, means; i, their places unless it has all; l and g, extremes where they differ; o, where some are null;
    v, the last value.
    """
    found = points(run.metrics, key)
    if not len(found.position):
        return None
    made: dict[str, Any] = {"m": short(found.mean), "v": short(np.array([run.metrics.last[key]]))[0]}
    if len(found.position) < len(run.metrics.used):
        made["i"] = found.position.tolist()
    if found.has_band:
        made |= {"l": short(found.least), "g": short(found.greatest)}
    if found.odd.any():
        made["o"] = found.odd.nonzero()[0].tolist()
    return made


def short(values: Floats, digits: int = DIGITS) -> list[float | int | None]:
    """Numbers with that many digits; None for a gap."""
    return [rounded(value, digits) if math.isfinite(value) else None for value in values.tolist()]


def rounded(value: float, digits: int) -> float | int:
    """A number with fewer digits; whole ones without a point."""
    found = float(f"{value:.{digits}g}")
    return int(found) if found.is_integer() and abs(found) < 1e15 else found
