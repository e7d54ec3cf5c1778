"""Operations in bfloat16 and float16 on the host, computed in float32 with each result rounded once.

This module defines low precision: sums and products are computed in float32, and results are rounded to bf16
or fp16. Tests compare the GPU's kernels and the host's bfloat16 kernels with this slow reference.
Statistics that forward keeps for backward, losses and tables of rotary positions are never in low precision.
A gradient to which an operation adds keeps its own type.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from typing import Any

import ml_dtypes
import numpy as np

from zero_mpi.device.types import Array
from zero_mpi.ops.signatures import Signature

BFLOAT16, FLOAT16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
LOW = (BFLOAT16, FLOAT16)
SIGNATURES: dict[str, Signature] = {}  # operations that get float32 copies of low-precision arrays


def widened(x: Any) -> Any:
    is_low = hasattr(x, "dtype") and x.dtype.itemsize == 2 and x.dtype in LOW
    return x.astype(np.float32) if is_low else x


def accept_low(name: str, operation: Callable[..., Any], native: Sequence[Any] = ()) -> Callable[..., Any]:
    """Return `operation` extended to low-precision arrays; return it unchanged if it is not in `SIGNATURES`.

    `native`: the low-precision types that `operation` computes without float32 copies.
    """
    if name not in SIGNATURES:
        return operation
    names, expected = list(signature(operation).parameters), SIGNATURES[name]
    type_from = names.index(next(entry.name for entry in expected.entries if entry.kind == "same"))

    @wraps(operation)
    def either(*arguments: Any, **keywords: Any) -> Any:
        kind = arguments[type_from].dtype
        if kind.itemsize != 2 or kind in native:
            return operation(*arguments, **keywords)
        return run_low(operation, expected, kind, dict(zip(names, arguments, strict=False)) | keywords)

    either.native = native  # type: ignore[attr-defined]
    return either


def run_low(operation: Callable[..., Any], expected: Signature, kind: Any, arguments: dict[str, Any]) -> Any:
    """Run the operation on widened arguments; round results of the arguments' type to `kind`."""
    wide = {name: widened(value) for name, value in arguments.items()}
    with np.errstate(over="ignore", invalid="ignore"):  # float16 may overflow to infinity
        result = operation(**wide)
    for name in (entry.name for entry in expected.entries if entry.written):
        if wide.get(name) is not arguments.get(name):
            arguments[name][...] = narrowed(wide[name], arguments[name].dtype)
            if result is wide[name]:
                return arguments[name]
    if len(expected.results) <= 1:
        return narrowed(result, kind)
    pairs = zip(result, expected.results, strict=True)
    return tuple(narrowed(x, kind) if role.axes and role.kind == "same" else x for x, role in pairs)


def narrowed(x: Array | None, kind: Any) -> Array | None:
    """Return `x` (or None) rounded to nearest, ties to even. Overflow gives infinity."""
    with np.errstate(over="ignore"):
        return None if x is None else x.astype(kind)
