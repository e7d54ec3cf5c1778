"""What commands print: text with its width, numbers with their units."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable
from itertools import pairwise

from zero_mpi.files.text import printable

WIDTH, MARGIN = 110, 12  # columns of the text, and of its titles
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
LETTERS = ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))  # from, unit, name
TIMES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def write(lines: Iterable[str], *, keep: str = "") -> None:
    """Print lines, each as one whatever is in it; a reader that has enough, as in `... | head`, is no error.

    `keep`: letters that stay though they do not print, such as ESC where colours are ours.
    """
    data = "".join(f"{printable(line, keep)}\n" for line in lines).encode("utf-8", "backslashreplace")
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def power_of_1024(count: float) -> int:
    """Of the unit that fits a number of bytes; its name stands there in UNITS."""
    return min(max(int(abs(count)).bit_length() - 1, 0) // 10, len(UNITS) - 1)


def size(count: int) -> str:
    """Bytes for people."""
    power = power_of_1024(count)
    return f"{count / 1024**power:.{int(power > 0)}f} {UNITS[power]}"


def plain(value: float) -> str:
    """A number with four significant digits, without a tail of zeros."""
    if not math.isfinite(value):
        return "not finite"
    if value and not 1e-4 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def count(value: float) -> str:
    """A count with a letter for thousands: 12.3k, 4M."""
    for limit, scale, letter in LETTERS:
        if abs(value) >= limit:
            return f"{value / scale:.4g}{letter}"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1e3 else f"{value:.4g}"


def duration(value: float) -> str:
    """Seconds, in one or two units: 41 s, 3 min 20 s, 2 h 5 min."""
    if value < 10:
        return f"{value:.2g} s"
    full = round(value)
    for (large, name), (small, less) in pairwise(TIMES):
        if full >= large:
            rest = full % large // small
            return f"{full // large} {name}" + (f" {rest} {less}" if rest else "")
    return f"{full} s"


def percent(value: float) -> str:
    """A share."""
    return f"{100 * value:.3g} %" if abs(value) < 9.99 else f"{100 * value:,.0f} %"
