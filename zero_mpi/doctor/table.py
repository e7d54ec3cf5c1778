"""The lines of the table: what was looked at, what was found, and what to do about it.

`ok` needs no remedy and the others have one: `note` costs speed, safety or reproducibility, with `bad` a job
would fail. Values come as text for people; figures for programs go into the JSON file beside the rows.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

OK, NOTE, BAD = "ok", "note", "bad"
WIDTH, TITLE = 110, 23  # columns of the table, and of the names of what was looked at
FEW = 8  # hosts, files and ranks that are named; of more there is only the number
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Row:
    """A line of the table; `remedy`: a command, a setting, or what to ask for."""

    what: str
    value: str
    verdict: str = OK
    remedy: str = ""

    def __post_init__(self) -> None:
        assert (self.verdict == OK) == (not self.remedy), f"{self.what}: a remedy goes with a fault"


def lines(row: Row) -> Iterator[str]:
    """A row for people; what to do stands below it."""
    margin = " " * (6 + TITLE + 1)
    text = f"{row.verdict:6}{row.what:{TITLE}} {row.value}"
    yield from wrapped(text, margin)
    if row.remedy:
        yield from wrapped(f"{margin}-> {row.remedy}", f"{margin}   ")


def wrapped(text: str, margin: str) -> list[str]:
    """A text in lines of the table's width, all but the first after a margin; words stay whole."""
    return textwrap.wrap(
        text,
        WIDTH,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )


def ranges(numbers: Sequence[int]) -> str:
    """0-3, 7 for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    spelled = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(few(spelled))


def ranks(numbers: Sequence[int]) -> str:
    """Rank 3; ranks 0-3, 7."""
    return f"rank{'s' * (len(numbers) != 1)} {ranges(numbers)}"


def few(names: Sequence[str]) -> list[str]:
    """The first few of many, and how many more there are."""
    more = len(names) - FEW
    return [*names] if more <= 0 else [*names[:FEW], f"{more} more"]


def plural(count: int, name: str) -> str:
    """1 core, 2 cores."""
    return f"{count:,} {name}{'s' * (count != 1)}"


def size(count: float) -> str:
    """Bytes for people."""
    power = min(max(int(count).bit_length() - 1, 0) // 10, len(UNITS) - 1)
    return f"{short(count / 1024**power)} {UNITS[power]}"


def short(number: float) -> str:
    """A number with one place after the point, if it is below 100 and that place is not 0."""
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}".removesuffix(".0")


def duration(seconds: float) -> str:
    """Seconds for people, two figures or so."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{short(seconds / unit)} {name}"
    return f"{seconds * 1e6:.0f} us"
