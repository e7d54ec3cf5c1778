"""Rows of the table: name, value, verdict, remedy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import TextWrapper

from zero_mpi.cli.text import WIDTH

OK, NOTE, BAD = "ok", "note", "bad"  # note: costs speed, safety or the same bits; bad: a job would fail
TITLE = 23  # columns of the names


@dataclass(frozen=True)
class Row:
    """Line of the table. Every verdict but ok has a remedy: a command, a setting, or what to ask for."""

    what: str
    value: str
    verdict: str = OK
    remedy: str = ""

    def __post_init__(self) -> None:
        assert (self.verdict == OK) == (not self.remedy), f"{self.what}: a remedy goes with a fault"


def assessed(what: str, value: str, fine: bool, remedy: str, fault: str = NOTE) -> Row:
    """Return a row that is ok, or has the verdict `fault` and the remedy."""
    return Row(what, value) if fine else Row(what, value, fault, remedy)


def lines(row: Row) -> Iterator[str]:
    """Yield a row as text of the table's width; the remedy stands below the value."""
    wrap = TextWrapper(WIDTH, break_long_words=False, break_on_hyphens=False, replace_whitespace=False)
    wrap.subsequent_indent = margin = " " * (6 + TITLE + 1)
    yield from wrap.wrap(f"{row.verdict:6}{row.what:{TITLE}} {row.value}")
    if row.remedy:
        wrap.subsequent_indent += "   "
        yield from wrap.wrap(f"{margin}-> {row.remedy}")
