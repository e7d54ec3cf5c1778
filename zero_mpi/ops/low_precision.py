"""The operations in bfloat16 and float16 on the host, computed in float32 with each result rounded once.

This module defines low precision: sums and products are computed in float32, and results have the low type.
The module is a slow reference for tests of the GPU's kernels and of the host's bfloat16 kernels. Statistics
that forward keeps for backward, losses and tables of rotary positions never have a low type. A gradient to
which an operation adds keeps its own type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import Any

import ml_dtypes
import numpy as np

from zero_mpi.device.types import Array
from zero_mpi.ops.signatures import Signature

BFLOAT16, FLOAT16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
LOW = (BFLOAT16, FLOAT16)


@dataclass(frozen=True)
class Roles:
    """The arguments and results of an operation that may have a low type.

    type_from     index of the argument whose type the results have
    rounded     indices of the results with the low type; None: the only result
    written     arguments that the operation writes; a result that is such an argument is not copied
    """

    type_from: int
    rounded: tuple[int, ...] | None
    written: tuple[str, ...]


ROLES: dict[str, Roles] = {}  # by name of the operation


def add_roles(definition: Callable[..., Any], expected: Signature) -> None:
    """Add the roles of an operation, taken from its signature, to `ROLES`."""
    type_from = next(entry.name for entry in expected.entries if entry.kind == "same")
    low = tuple(
        place for place, result in enumerate(expected.results) if result.axes and result.kind == "same"
    )
    written = tuple(entry.name for entry in expected.entries if entry.written)
    place = list(signature(definition).parameters).index(type_from)
    ROLES[definition.__name__] = Roles(place, low if len(expected.results) > 1 else None, written)


def widened(x: Any) -> Any:
    """Return a float32 copy of a low-precision array; return any other value unchanged."""
    is_low = hasattr(x, "dtype") and x.dtype.itemsize == 2 and x.dtype in LOW
    return x.astype(np.float32) if is_low else x


def accept_low(name: str, operation: Callable[..., Any], native: Sequence[Any] = ()) -> Callable[..., Any]:
    """Return `operation` extended to low-precision arrays; return it unchanged if it has no `ROLES`.

    `native`: the low types that `operation` computes without float32 copies.
    """
    roles = ROLES.get(name)
    if roles is None:
        return operation
    names, type_from = list(signature(operation).parameters), roles.type_from

    @wraps(operation)
    def either(*given: Any, **named: Any) -> Any:
        kind = given[type_from].dtype
        if kind.itemsize != 2 or kind in native:
            return operation(*given, **named)
        return run_low(operation, roles, dict(zip(names, given, strict=False)) | named)

    either.native = native  # type: ignore[attr-defined]
    return either


def run_low(operation: Callable[..., Any], roles: Roles, given: dict[str, Any]) -> Any:
    """Run the operation on widened arguments; round its results to the type of the argument `type_from`."""
    kind = list(given.values())[roles.type_from].dtype
    wide = {name: widened(value) for name, value in given.items()}
    with np.errstate(over="ignore", invalid="ignore"):  # float16 may overflow to infinity
        result = operation(**wide)
    for name in roles.written:
        if wide.get(name) is not given.get(name):
            given[name][...] = narrowed(wide[name], given[name].dtype)
            if result is wide[name]:
                return given[name]
    if roles.rounded is None:
        return narrowed(result, kind)
    return tuple(narrowed(x, kind) if place in roles.rounded else x for place, x in enumerate(result))


def narrowed(x: Array | None, kind: Any) -> Array | None:
    """Return `x` (or None) rounded to nearest, ties to even. Overflow gives infinity, as norms show."""
    with np.errstate(over="ignore"):
        return None if x is None else x.astype(kind)
