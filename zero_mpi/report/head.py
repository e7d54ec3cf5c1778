"""The top of the page: names, states, and the few numbers that a reader wants first.

One run has them as tiles, several as columns of a table.
"""

from __future__ import annotations

from collections.abc import Sequence

from zero_mpi.files.foreign import shown
from zero_mpi.report.colours import class_of
from zero_mpi.report.figures import Figure, figures, state_line
from zero_mpi.report.markup import row, safe, scrolling, tag
from zero_mpi.report.runs import Run, moment

MOST_STATE = 20  # letters of a state


def head(runs: Sequence[Run]) -> str:
    """Everything above the charts."""
    theme = tag("button", "Light / dark", id="theme", class_="needs-js", type="button")
    bar = tag("div", tag("span", "zero_mpi report", class_="brand"), theme, class_="bar")
    about = single(runs[0]) if len(runs) == 1 else several(runs)
    return tag("header", bar, about)


def single(run: Run) -> str:
    """One run."""
    said = state_line(run)
    return "".join(
        [
            tag("div", tag("h1", safe(run.name)), badge(run), class_="title"),
            "" if said == run.state else tag("p", safe(said), class_="lead"),
            tag("p", safe(whereabouts(run)), class_="lead note"),
            tag("dl", *map(tile, figures(run)), class_="tiles"),
        ]
    )


def badge(run: Run) -> str:
    """The state in a word."""
    state = shown(run.state or "unknown", MOST_STATE)
    return tag("span", safe(state), class_=f"badge {state}")


def whereabouts(run: Run) -> str:
    """Where the run is, and when it was heard of."""
    times = {name: moment(run.status.get(name)) for name in ("started", "updated")}
    told = [f"{name} {when:%Y-%m-%d %H:%M} UTC" for name, when in times.items() if when]
    return ", ".join([str(run.path), *told])


def tile(one: Figure) -> str:
    """A number in its box."""
    parts = [tag("dt", safe(one.name)), tag("dd", safe(one.value))]
    if one.note or one.share is not None:
        parts.append(tag("dd", safe(one.note), way(one.share), class_="sub"))
    return tag("div", *parts, class_="tile")


def way(share: float | None) -> str:
    """A bar that shows how far it is."""
    if share is None:
        return ""
    bar = tag("rect", width=f"{100 * share:.1f}", height=4)
    return tag("svg", bar, viewBox="0 0 100 4", preserveAspectRatio="none", aria_hidden="true")


def several(runs: Sequence[Run]) -> str:
    """Runs side by side."""
    found = [{one.name: one for one in figures(run)} for run in runs]
    names = list(dict.fromkeys(name for one in found for name in one))
    heads = [tag("th", label(runs, number), scope="col") for number in range(len(runs))]
    rows = [row("State", *map(badge, runs))]
    rows += [
        row(safe(name), *(figure_cell(one[name]) if name in one else "" for one in found)) for name in names
    ]
    body = tag("thead", tag("tr", tag("td"), *heads)) + tag("tbody", *rows)
    return tag("h1", f"{len(runs)} runs") + tag(
        "div", scrolling("Runs", tag("table", body, class_="compare")), class_="side-by-side"
    )


def figure_cell(one: Figure) -> str:
    """A number and what it is beside."""
    return safe(one.value) + (tag("small", safe(one.note)) if one.note else "")


def swatch(number: int) -> str:
    """The colour of a run."""
    return tag("span", class_=f"swatch {class_of(number)}")


def label(runs: Sequence[Run], number: int) -> str:
    """A run's name with its colour."""
    return f"{swatch(number)}{safe(runs[number].name)}"
