"""Colours of runs and of what happened to them, each for a light and for a dark ground.

Most colour-blind people tell the runs apart: Okabe and Ito's colours, made to stand out on both grounds; from
the fifth on lines are dashed as well. Validation has another tone of its run's colour; where the page has one
run, another colour.
"""

from __future__ import annotations

Shades = tuple[str, str]  # light, dark
RUNS: tuple[Shades, ...] = (
    ("#0072b2", "#56a8e6"), ("#d55e00", "#ff914d"), ("#00916a", "#2fcf9f"), ("#b0478f", "#e58fc6"),
    ("#a67c00", "#f0c14b"), ("#7a5c3e", "#c8a27a"), ("#5b6b7d", "#aab6c5"), ("#5546c8", "#a79bff"),
)  # fmt: skip
TONES: tuple[Shades, ...] = (
    ("#00456d", "#a9d6ff"), ("#8f3f00", "#ffc79f"), ("#005a41", "#9aeccf"), ("#742e5e", "#f5c9e5"),
    ("#6b5000", "#f9e3a6"), ("#4d3926", "#e2c9aa"), ("#38434f", "#d3dce6"), ("#352a85", "#cfc9ff"),
)  # fmt: skip
BAD, WARN, INK = ("#b3261e", "#ff8a80"), ("#8a5a00", "#f0b429"), ("#1a1e24", "#e7eaee")
SOLID = 4  # runs whose lines are whole


def of_run(number: int) -> Shades:
    """Of a run's curves; a ninth run takes the first one again."""
    return RUNS[number % len(RUNS)]


def of_validation(number: int, is_alone: bool) -> Shades:
    """Of validation, beside the training of the same run."""
    return of_run(number + 1) if is_alone else TONES[number % len(TONES)]


def dash(number: int) -> str:
    """How a run's lines are broken."""
    return "solid" if number < SOLID else "dash" if number < len(RUNS) else "dot"


def class_of(number: int) -> str:
    """The class of a run's colour in the style of the page."""
    return f"c{number % len(RUNS)}"


def swatch_styles() -> str:
    """These classes."""
    return "".join(
        f".{class_of(number)} {{ --c: light-dark({light}, {dark}); }}\n"
        for number, (light, dark) in enumerate(RUNS)
    )
