"""The rows of the table: what was looked at, what was found, and what to do about it.

`ok` needs no remedy and the others have one: `note` costs speed, safety or reproducibility, with `bad` a job
would fail. Values come as text for people; figures for programs go into the JSON file beside the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import TextWrapper

from zero_mpi.cli.text import WIDTH

OK, NOTE, BAD = "ok", "note", "bad"
TITLE = 23  # columns of the names of what was looked at


@dataclass(frozen=True)
class Row:
    """A line of the table; `remedy`: a command, a setting, or what to ask for."""

    what: str
    value: str
    verdict: str = OK
    remedy: str = ""

    def __post_init__(self) -> None:
        assert (self.verdict == OK) == (not self.remedy), f"{self.what}: a remedy goes with a fault"


def assessed(what: str, value: str, fine: bool, remedy: str, fault: str = NOTE) -> Row:
    """The row of what is fine, or else needs its remedy."""
    return Row(what, value) if fine else Row(what, value, fault, remedy)


def lines(row: Row) -> Iterator[str]:
    """A row for people, in lines of the table's width; what to do stands below it, and words stay whole."""
    wrap = TextWrapper(WIDTH, break_long_words=False, break_on_hyphens=False, replace_whitespace=False)
    wrap.subsequent_indent = margin = " " * (6 + TITLE + 1)
    yield from wrap.wrap(f"{row.verdict:6}{row.what:{TITLE}} {row.value}")
    if row.remedy:
        wrap.subsequent_indent += "   "
        yield from wrap.wrap(f"{margin}-> {row.remedy}")
