"""Signatures of operations: the shapes and types of arrays, checked before any version of an operation runs.

Kernels do not check bounds: they would read and write beyond the end of an array that is too small. For
shapes and types that were checked before, the check costs one look-up.

A signature has an entry `name axes type` for each array, separated by commas. `?` marks an array that may be
None, and `+` an array that is written. Axes are those of `reference`; `...` is any number of axes, and a
letter has the same length throughout. All arrays without a type have the same type. `wide` is that type or
float32, whichever is wider; `real` is any real type, `whole` any integer type. A name without axes is a
number or a string, which a condition after a semicolon may use. Results follow an arrow and have no names.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from inspect import Parameter
from typing import Any

import ml_dtypes
import numpy as np

from zero_mpi.ops.block_kinds import BLOCK_KINDS

SINGLE = np.dtype(np.float32)
REAL = (SINGLE, np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float64))
WHOLE = tuple(map(np.dtype, ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")))
EXAMPLES = {float: 0.3, int: 5, bool: False}  # example values by the type of a parameter
CACHE_SIZE = 256  # maximum number of combinations of shapes and types cached per operation


@dataclass(frozen=True)
class Entry:
    """Argument or result in a signature: an array or, if there are no axes, a number or a string."""

    name: str
    axes: tuple[str, ...]
    kind: str
    optional: bool = False
    written: bool = False


@dataclass(frozen=True)
class Signature:
    """Parsed signature `text`: arguments and results of an operation, and a condition on their sizes."""

    entries: tuple[Entry, ...]
    results: tuple[Entry, ...]
    condition: str
    text: str


def parse(text: str) -> Signature:
    """Return the signature that a text describes."""
    arrays, _, condition = text.partition("; ")
    inputs, _, outputs = arrays.partition(" -> ")
    entries = [
        Entry(first.rstrip("?+"), *axes_and_kind(axes), "?" in first, "+" in first)
        for first, *axes in map(str.split, inputs.split(", "))
    ]
    results = [Entry("", *axes_and_kind(axes)) for axes in map(str.split, outputs.split(", ")) if axes]
    return Signature(tuple(entries), tuple(results), condition, text)


def axes_and_kind(words: list[str]) -> tuple[tuple[str, ...], str]:
    kind = words.pop() if words and words[-1].islower() else "same"
    return tuple(words), kind


def checked(
    definition: Callable[..., Any], expected: Signature, versions: Mapping[type, Callable[..., Any]]
) -> Callable[..., Any]:
    """Return a function with the parameters of `definition`; it calls the version for the first array's type.

    The function raises ValueError if its arrays do not fit. It is made from source text for speed: a call
    reads each array's shape once and builds no list of arguments.
    """
    facts = []
    for entry in expected.entries:
        fact = f"({entry.name}.shape, {entry.name}.dtype)" if entry.axes else entry.name
        facts.append(f"{entry.name} is not None and {fact}" if entry.optional else fact)
    signature = inspect.signature(definition)
    plain = [parameter.replace(annotation=Parameter.empty) for parameter in signature.parameters.values()]
    parameters = str(signature.replace(parameters=plain, return_annotation=signature.empty))[1:-1]
    seen = lru_cache(CACHE_SIZE)(partial(examine, definition.__name__, expected))
    first, *rest = signature.parameters.values()
    arguments = [f"{x.name}={x.name}" if x.kind is Parameter.KEYWORD_ONLY else x.name for x in rest]
    call = f"versions[{first.name}.__class__]({', '.join((first.name, *arguments))})"
    scope = {"seen": seen, "versions": versions}
    result: Callable[..., Any] = eval(f"lambda {parameters}: seen({', '.join(facts)}) or {call}", scope)
    return result


def examine(name: str, signature: Signature, *facts: Any) -> None:
    """Raise ValueError unless arguments fit. facts: an array's (shape, type), False for None, or a number."""
    sizes: dict[str, Any] = {"1": 1}
    types, expected = {"real": REAL, "whole": WHOLE, "same": REAL}, ""
    for entry, fact in zip(signature.entries, facts, strict=True):
        if not entry.axes:
            sizes[entry.name] = fact
        elif fact:
            (shape, dtype), allowed = fact, types.get(entry.kind) or (np.dtype(entry.kind),)
            if not bind(entry.axes, shape, sizes) or dtype not in allowed:
                lengths = ", ".join(f"{axis}={sizes[axis]}" if axis in sizes else axis for axis in entry.axes)
                expected = f"{entry.name} ({lengths}) of {' or '.join(map(str, allowed))}"
                break
            if entry.kind == "same":
                types |= {"same": (dtype,), "wide": (dtype if dtype.itemsize > 4 else SINGLE,)}
    condition = signature.condition
    if not expected and condition and not eval(condition, {"bytes_of": bytes_of}, sizes):
        expected = signature.text
    if expected:
        actual = (
            f"{entry.name} {fact[0]} {fact[1]}" if entry.axes else f"{entry.name} {fact}"
            for entry, fact in zip(signature.entries, facts, strict=True)
            if fact
        )
        raise ValueError(f"{name}: expected {expected}; got {', '.join(actual)}")


def shape_of(axes: Sequence[str], sizes: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape for `axes`. `sizes`: length of each axis (default 4), and a tuple for `...`."""
    lengths = (sizes.get(axis, 4) for axis in axes)
    return tuple(n for length in lengths for n in (length if isinstance(length, tuple) else (length,)))


def example(operation: Any, sizes: Mapping[str, Any], draw: Callable[..., Any], full: bool) -> dict[str, Any]:
    """Return arguments that fit an operation, by name; optional arguments are None unless `full`.

    sizes: lengths of axes, as in `shape_of`. draw(shape, kind, number, limit) makes the array of argument
    `number`; integers in the array must be less than `limit`.
    """
    entries = {entry.name: entry for entry in operation.signature.entries}
    axes = {axis for entry in entries.values() for axis in entry.axes if axis.isalpha()}
    limit = min((sizes.get(axis, 4) for axis in axes), default=1)
    arguments: dict[str, Any] = {}
    for number, parameter in enumerate(inspect.signature(operation).parameters.values()):
        entry = entries.get(parameter.name)
        value = EXAMPLES.get(parameter.annotation)  # None for an optional array
        if entry is not None and entry.axes and (full or not entry.optional):
            value = draw(shape_of(entry.axes, sizes), entry.kind, number, limit)
        arguments[parameter.name] = value
    return arguments


def results_of(signature: Signature, arrays: Mapping[str, Any]) -> list[tuple[tuple[int, ...], Any] | None]:
    """Return each result's (shape, type) for fitting arguments; None for a result that is not an array."""
    sizes, dtype = dict[str, Any]({"1": 1}), SINGLE
    for entry in reversed(signature.entries):
        if entry.axes and arrays.get(entry.name) is not None:
            bind(entry.axes, arrays[entry.name].shape, sizes)
            dtype = arrays[entry.name].dtype if entry.kind == "same" else dtype
    kinds = {"same": dtype, "wide": max(dtype, SINGLE, key=lambda kind: kind.itemsize)}
    return [(shape_of(x.axes, sizes), kinds[x.kind]) if x.axes else None for x in signature.results]


def bind(axes: Sequence[str], shape: tuple[int, ...], sizes: dict[str, Any]) -> bool:
    """Set the lengths of axes from a shape; return False if the shape does not fit the axes."""
    ellipsis = axes[0] == "..."
    lead = len(shape) - len(axes) + ellipsis
    lengths = (shape[:lead], *shape[lead:]) if ellipsis else shape
    fits = lead >= 0 if ellipsis else lead == 0
    return fits and all(sizes.setdefault(axis, n) == n for axis, n in zip(axes, lengths, strict=True))


def bytes_of(kind: str, size: int) -> int:
    """Return the bytes of `size` elements of a kind, or -1 for an unknown kind or an incomplete block."""
    block = BLOCK_KINDS.get(kind)
    return -1 if block is None or size % block.elements else block.bytes_of(size)
