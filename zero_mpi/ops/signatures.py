"""Shapes and types of the arrays that each operation takes, checked before any version of it runs.

Kernels check no bounds: they would read and write beyond the end of an array that is too small. A call whose
shapes and types were seen before costs a look-up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from inspect import Parameter, signature
from typing import Any

import ml_dtypes
import numpy as np

from zero_mpi.ops.block_kinds import BLOCK_KINDS

# Arrays as `name axes type`, separated by commas; `?` marks one that may be None. Axes are those of
# `reference`, `...` stands for any number of them, and a letter has one length throughout. Without a type
# an array has that of the first such one; `wide` is that or float32, whichever is wider; `real` and
# `whole` are any such type. A name alone is a number or a string that the condition behind the semicolon
# reads.
GROUPED = "; S >= T and K > 0 and H % K == 0"
SIGNATURES = {
    "add": "x ..., y ...",
    "scale": "x ..., plus? ...",
    "linear": "x ... C, w O C, b? O, plus? ... O",
    "linear_backward_x": "dy ... O, w O C, into? ... C",
    "linear_backward_w": "dy ... O, x ... C, dw O C real",
    "linear_backward_b": "dy ... O, db O real",
    "embedding": "tokens ... whole, w V C",
    "embedding_backward": "tokens ... whole, dy ... C, dw V C real",
    "positions": "x B T C, w T C",
    "positions_backward": "dy B T C, dw T C real",
    "rms_norm": "x ... C, w C",
    "rms_norm_backward": "dy ... C, x ... C, w C, r ... 1 wide, dw? C real, plus? ... C",
    "layer_norm": "x ... C, w C, b C",
    "layer_norm_backward": (
        "dy ... C, x ... C, w C, mean ... 1 wide, r ... 1 wide, dw? C real, db? C real, plus? ... C"
    ),
    "gelu": "x ...",
    "gelu_backward": "dy ..., x ...",
    "swiglu": "gate ..., up ...",
    "swiglu_backward": "dy ..., gate ..., up ...",
    "geglu": "gate ..., up ...",
    "geglu_backward": "dy ..., gate ..., up ...",
    "rope": "x B T H D, cos T E wide, sin T E wide, out? B T H D; 2 * E <= D",
    "causal_attention": "q B T H D, k B S K D, v B S K E, begins? B T int64" + GROUPED,
    "causal_attention_backward": "dy B T H E, q B T H D, k B S K D, v B S K E" + GROUPED,
    "cross_entropy": "logits ... V, targets ... whole",
    "linear_cross_entropy": "x ... C, w V C, b? V, targets ... whole, dw? V C real, db? V real",
    "linear_wide": "x ... C, w O C real, plus? ... O wide",
    "route": "logits T N, used; 0 < used <= N",
    "route_backward": "dw R 1, w R 1 wide, p T N wide, chosen T U int64, rows R int64; R == T * U",
    "weighted_swiglu": "gate R F, up R F, w R 1 wide",
    "weighted_swiglu_backward": "dy R F, gate R F, up R F, w R 1 wide",
    "grouped_linear": "x R C, w N O C, starts M int64, plus? R O; M == N + 1",
    "grouped_linear_backward_x": "dy R O, w N O C, starts M int64, into? R C; M == N + 1",
    "grouped_linear_backward_w": "dy R O, x R C, dw N O C real, starts M int64; M == N + 1",
    "adamw": "p N, g N, m N, v N, decay R float64, low? N real; N == 0 or R > 0 and N % R == 0",
    "moving_average": "e N, p N",
    "chunk_squares": "g N, chunk; chunk > 0 and N % chunk == 0",
    "dequantize": "raw N uint8, kind, out M real; N == bytes_of(kind, M)",
}
SINGLE = np.dtype(np.float32)
REAL = (SINGLE, np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float64))
WHOLE = tuple(map(np.dtype, ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")))
SEEN = 256  # shapes and types of an operation that are remembered
Entry = tuple[str, list[str], str]  # an argument's name, axes, and type


def check_of(definition: Callable[..., Any]) -> Callable[..., None]:
    """Return a function with the parameters of `definition` that raises ValueError if its arrays do not fit.

    It is made from source text, so that a call looks at each array once and makes no list of its arguments.
    """
    name = definition.__name__
    text, _, condition = SIGNATURES[name].partition("; ")
    entries, looks = [], []
    for first, *axes in (entry.split() for entry in text.split(", ")):
        argument, kind = first.rstrip("?"), axes.pop() if axes and axes[-1].islower() else "same"
        entries.append((argument, axes, kind))
        look = f"({argument}.shape, {argument}.dtype)" if axes else argument
        looks.append(f"{argument} is not None and {look}" if first != argument else look)
    taken = signature(definition)
    plain = [parameter.replace(annotation=Parameter.empty) for parameter in taken.parameters.values()]
    parameters = str(taken.replace(parameters=plain, return_annotation=taken.empty))[1:-1]
    seen = lru_cache(SEEN)(partial(examine, name, entries, condition))
    check: Callable[..., None] = eval(f"lambda {parameters}: seen({', '.join(looks)})", {"seen": seen})
    return check


def examine(name: str, entries: Sequence[Entry], condition: str, *given: Any) -> None:
    """Raise ValueError unless each array's (shape, type), or False in the place of None, fits its entry."""
    sizes: dict[str, Any] = {"1": 1}
    types, expected = {"real": REAL, "whole": WHOLE, "same": REAL}, ""
    for (argument, axes, kind), found in zip(entries, given, strict=True):
        if not axes:
            sizes[argument] = found
        elif found:
            (shape, dtype), allowed = found, types.get(kind) or (np.dtype(kind),)
            if not bind(axes, shape, sizes) or dtype not in allowed:
                lengths = ", ".join(f"{axis}={sizes[axis]}" if axis in sizes else axis for axis in axes)
                expected = f"{argument} ({lengths}) of {' or '.join(map(str, allowed))}"
                break
            if kind == "same":
                types |= {"same": (dtype,), "wide": (dtype if dtype.itemsize > 4 else SINGLE,)}
    if not expected and condition and not eval(condition, {"bytes_of": bytes_of}, sizes):
        expected = SIGNATURES[name]
    if expected:
        came = (
            f"{argument} {found[0]} {found[1]}" if axes else f"{argument} {found}"
            for (argument, axes, _), found in zip(entries, given, strict=True)
            if found
        )
        raise ValueError(f"{name}: expected {expected}; got {', '.join(came)}")


def bind(axes: Sequence[str], shape: tuple[int, ...], sizes: dict[str, Any]) -> bool:
    """Give axes the lengths of a shape; return whether they have no others already."""
    many = axes[0] == "..."
    lead = len(shape) - len(axes) + many
    lengths = (shape[:lead], *shape[lead:]) if many else shape
    fits = lead >= 0 if many else lead == 0
    return fits and all(sizes.setdefault(axis, n) == n for axis, n in zip(axes, lengths, strict=True))


def bytes_of(kind: str, size: int) -> int:
    """Return the bytes of `size` elements in blocks of a kind; -1 if there are no such blocks."""
    block = BLOCK_KINDS.get(kind)
    return -1 if block is None or size % block.elements else block.bytes_of(size)


def defined_in(modules: Sequence[Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the name and the version of each operation that some modules define."""
    for module in modules:
        for name in SIGNATURES:
            version = vars(module).get(name)
            if getattr(version, "__module__", "") == module.__name__:
                yield name, version
