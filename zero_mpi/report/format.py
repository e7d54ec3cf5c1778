"""Numbers for people: sizes, times, counts, and the places of an axis's ticks.

Everything here takes a float and gives a short text. `page.js` and `chart.js` write the same forms, so that a
number under the pointer looks like the one on the axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

STEPS = ((7.0, 10.0), (3.2, 5.0), (1.4, 2.0), (0.0, 1.0))  # from so many on, ticks are so far apart
BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
LETTERS = ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))  # from, unit, name
TIMES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def whole(value: float) -> str:
    """A number without a fraction; halves go up, as in JavaScript."""
    return f"{math.floor(value + 0.5):,}"


def plain(value: float) -> str:
    """Four significant digits, without a tail of zeros."""
    if not math.isfinite(value):
        return "not finite"
    if value and not 1e-4 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}" if abs(value) < 1e4 else whole(value)


def count(value: float) -> str:
    """A count with a letter for thousands: 12.3k, 4M."""
    for limit, scale, letter in LETTERS:
        if abs(value) >= limit:
            return f"{value / scale:.4g}{letter}"
    return whole(value) if value == int(value) or abs(value) >= 1e3 else f"{value:.4g}"


def size(value: float) -> str:
    """Bytes."""
    unit = binary_unit(value)
    return f"{value / 1024**unit:.4g} {BINARY[unit]}" if unit else f"{whole(value)} B"


def binary_unit(value: float) -> int:
    """The power of 1024 that fits a number of bytes."""
    unit = 0
    while abs(value) >= 1024 and unit + 1 < len(BINARY):
        value, unit = value / 1024, unit + 1
    return unit


def duration(value: float) -> str:
    """Seconds, in one or two units: 41 s, 3 min 20 s, 2 h 5 min."""
    if value < 10:
        return f"{value:.2g} s"
    full = math.floor(value + 0.5)
    for (large, name), (small, less) in pairwise(TIMES):
        if full >= large:
            rest = (full % int(large)) // int(small)
            return f"{full // int(large)} {name}" + (f" {rest} {less}" if rest else "")
    return f"{full} s"


def percent(value: float) -> str:
    """A share."""
    return f"{100 * value:.3g} %" if abs(value) < 9.99 else f"{whole(100 * value)} %"


FORMS = {"plain": plain, "count": count, "bytes": size, "seconds": duration, "percent": percent}


def shown(value: float, form: str) -> str:
    """A number in the form of its chart."""
    return FORMS[form](value) if math.isfinite(value) else "not finite"


def labels(places: Sequence[float], form: str) -> list[str]:
    """Labels of an axis, all in the unit of the largest."""
    most = max(map(abs, places), default=0.0)
    if form == "bytes":
        unit = binary_unit(most)
        return [f"{place / 1024**unit:.4g} {BINARY[unit]}" if place else "0" for place in places]
    if form == "count":
        scale, letter = next(
            ((scale, letter) for limit, scale, letter in LETTERS if most >= limit), (1.0, "")
        )
        return [f"{place / scale:.4g}{letter}" if place and letter else count(place) for place in places]
    return [shown(place, form) for place in places]


def ticks(low: float, high: float, most: int, form: str = "plain") -> list[float]:
    """Round numbers from `low` to `high`, about `most` of them."""
    unit = 1024.0 ** binary_unit(max(abs(low), abs(high))) if form == "bytes" else 1.0
    low, high = low / unit, high / unit
    rough = (high - low) / max(most, 1)
    if not rough > 0 or not math.isfinite(rough):
        return [low * unit]
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(times for least, times in STEPS if rough / power >= least)
    first = math.ceil(low / step - 1e-9)
    return [place * step * unit for place in range(first, math.floor(high / step + 1e-9) + 1)]
