"""Checks of the library functions' arguments, made before the arguments are used.

A script with a mistake should end immediately on every rank, with a line that says what was expected and what
was found. It should not hang three calls later because it waits for a rank that has ended. Integers and NumPy
scalars count as numbers; True does not. All errors are ValueError.
"""

import math
import operator
from collections.abc import Collection
from numbers import Real
from typing import Any

from zero_mpi.files.foreign import shown

REAL, WHOLE, FLOATING = "fiubV", "iu", "fV"  # kinds of dtypes; "V" includes ml_dtypes' low-precision types
UNCOUNTED = -1  # target that the loss ignores


def came(value: object) -> str:
    """Return text for a value in an error message: the value if it is simple, otherwise its type."""
    if value is None or isinstance(value, str | bool | int | float | complex | Real | tuple):
        return shown(value if not isinstance(value, str) else repr(value), 60)
    return f"a {type(value).__name__}"


def whole(label: str, value: Any, least: int | None = None, below: int | None = None) -> int:
    """Return `value` as an integer of at least `least` and below `below`."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    fits = number is not None and (least is None or number >= least) and (below is None or number < below)
    if number is None or not fits:
        limits = "" if least is None else f" of at least {least}"
        limits = limits if below is None else f" from {least} to {below - 1}"
        raise ValueError(f"{label}: expected a whole number{limits}, got {came(value)}")
    return number


def number(
    label: str, value: Any, *, least: float | None = None, above: float | None = None, below: float = math.inf
) -> float:
    """Return `value` as a finite number of at least `least`, above `above` and below `below`."""
    limits = [f"of at least {least:g}"] if least is not None else []
    limits += [f"above {above:g}"] if above is not None else []
    limits += [f"below {below:g}"] if below != math.inf else ["not infinite"]
    if isinstance(value, Real) and value is not True and value is not False:
        scalar = float(value)
        is_high = (least is None or scalar >= least) and (above is None or scalar > above)
        if is_high and -math.inf < scalar < below:
            return scalar
    raise ValueError(f"{label}: expected a number {' and '.join(limits)}, got {came(value)}")


def instance(label: str, value: Any, kind: Any, example: str) -> None:
    """Raise ValueError unless `value` is a `kind`; `example` says what was expected."""
    if not isinstance(value, kind):
        raise ValueError(f"{label}: expected {example}, got {came(value)}")


def array(label: str, value: Any, shape: tuple[int, ...] | None = None, *, kinds: str = REAL) -> None:
    """Raise ValueError unless `value` is an array whose dtype's kind is in `kinds`, with `shape` if given."""
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        raise ValueError(f"{label}: expected an array, got {came(value)}")
    if value.dtype.kind not in kinds or value.dtype.name.startswith("void"):
        kind = "whole" if kinds == WHOLE else "real" if kinds == REAL else "floating"
        raise ValueError(f"{label}: expected an array of {kind} numbers, got one of {value.dtype.name}")
    if shape is not None and tuple(value.shape) != shape:
        raise ValueError(f"{label}: expected shape {shape}, got {tuple(value.shape)}")


def same_names(label: str, names: Collection[Any], reference: Collection[str]) -> None:
    """Raise ValueError, with the first missing and surplus names, if `names` differs from `reference`."""
    missing = [name for name in reference if name not in names]
    surplus = [name for name in names if name not in reference]
    if missing or surplus:
        raise ValueError(f"{label}: missing {some(missing)}; surplus {some(surplus)}")


def some(names: Collection[Any], most: int = 3) -> str:
    """Return the first few names and the number of the others; "none" if there are no names."""
    first = ", ".join(shown(name, 60) for name in list(names)[:most])
    return (first or "none") + (f" and {len(names) - most} more" if len(names) > most else "")
