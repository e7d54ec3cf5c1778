"""Calls of each operation: a valid call with every argument, and variants, most of which must be refused."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np

from zero_mpi import ops
from zero_mpi.ops.low_precision import BFLOAT16
from zero_mpi.ops.registry import OPERATIONS
from zero_mpi.ops.signatures import example

Given = dict[str, Any]
SIZES = {"...": (2, 3), "1": 1, "B": 2, "T": 3, "C": 5, "O": 8, "V": 8, "H": 4, "K": 2, "S": 7}
SIZES |= {"D": 6, "E": 3, "N": 35, "R": 5}


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def drawn(shape: tuple[int, ...], kind: str, number: int, below: int) -> np.ndarray:
    values = numbers(*shape, seed=number)
    return (np.abs(100 * values) % max(1, below - 1)).astype(np.int64) if kind == "whole" else values


def of_experts() -> dict[str, Given]:
    rows, ends = numbers(6, 4), np.array([0, 2, 2, 6])
    stack, weight = {"w": numbers(3, 4, 5), "starts": ends}, np.ones((6, 1), np.float32)
    routed = {"p": numbers(3, 4), "chosen": np.array([[0, 1], [1, 2], [2, 0]]), "rows": np.arange(6)}
    return {
        "route": {"logits": numbers(3, 4), "used": 2, "normalized": True},
        "route_backward": {"dw": weight, "w": weight + 1, **routed, "normalized": True},
        "grouped_linear": {"x": numbers(6, 5), **stack, "plus": rows},
        "grouped_linear_backward_x": {"dy": rows, **stack, "into": numbers(6, 5)},
        "grouped_linear_backward_w": {"dy": rows, "x": numbers(6, 5), "dw": numbers(3, 4, 5), "starts": ends},
    }


def special() -> dict[str, Given]:
    """Return arguments that signatures do not describe."""
    begins = np.array([[0, 0, 1], [0, 2, 2]])
    return {
        "causal_attention": {"v": numbers(2, 7, 2, 5), "begins": begins},
        "causal_attention_backward": {"p": None, "dy": numbers(2, 3, 4, 5), "v": numbers(2, 7, 2, 5)},
        "linear_cross_entropy": {"need_dx": True},
        **of_experts(),
        "adamw": {"v": numbers(35) ** 2, "decay": np.zeros(5), "step": 1},
        "dequantize": {"raw": np.zeros(3 * 34, np.uint8), "kind": "Q8_0", "out": numbers(3 * 32)},
    }


@cache
def fitting(**sizes: int) -> dict[str, Given]:
    examples = {name: example(one, SIZES | sizes, drawn, True) for name, one in OPERATIONS.items()}
    return {name: args | special().get(name, {}) for name, args in examples.items()}


# (operation, argument) -> changes that are valid too: axes of other lengths, `more` or `fewer` axes.
FREE: dict[tuple[str, str], tuple[Any, ...]] = {
    ("linear_backward_b", "dy"): (0, 1, "more", "fewer"),
    ("gelu", "x"): (0, 1, "more", "fewer"),
    ("embedding", "tokens"): (0, 1, "more", "fewer"),
    ("embedding", "w"): (0, 1),
    ("embedding_backward", "dw"): (0,),
    ("positions", "x"): (0,),
    ("positions_backward", "dy"): (0,),
    ("rms_norm", "x"): (0, 1, "more", "fewer"),
    ("layer_norm", "x"): (0, 1, "more", "fewer"),
    ("causal_attention", "v"): (3,),
    ("cross_entropy", "logits"): (2,),
    ("route", "logits"): (0, 1),
    ("route_backward", "p"): (1,),
}


def resized(x: np.ndarray, axis: int, by: int) -> np.ndarray:
    return np.delete(x, -1, axis) if by < 0 else np.concatenate((x, x.take([-1], axis)), axis)


def changed(x: np.ndarray) -> Iterator[tuple[Any, np.ndarray]]:
    """Yield (axis or kind of change, changed array): other lengths or numbers of axes, and other types."""
    for axis in range(x.ndim):
        yield from ((axis, resized(x, axis, by)) for by in (-1, 1) if x.shape[axis] + by)
    yield "more", x[None]
    yield "fewer", x[0]
    other = {"f": np.int64, "i": np.float32, "u": np.int8}[x.dtype.kind]
    yield "type", x.astype(other)
    yield "type", x.astype(np.complex64)


def calls(name: str) -> Iterator[tuple[str, bool, Given]]:
    """Yield (label, whether it is valid, arguments) of calls that replace one array of the valid call."""
    for argument, array in fitting()[name].items():
        if isinstance(array, np.ndarray):
            for label, other in changed(array):
                args = fitting()[name] | {argument: other}
                yield (
                    f"{argument} {label} {other.shape} {other.dtype}",
                    label in FREE.get((name, argument), ()),
                    args,
                )


def call(name: str, args: Given, place: Callable[[np.ndarray], Any]) -> tuple[Any, Given]:
    copies = {k: place(x) if isinstance(x, np.ndarray) and k != "decay" else x for k, x in args.items()}
    if name == "causal_attention_backward" and copies["p"] is None:
        dtype = BFLOAT16 if args["q"].dtype == BFLOAT16 else np.float32
        inputs = (place(fitting()[name][key].astype(dtype)) for key in "qkv")
        copies["p"] = ops.causal_attention(*inputs, copies["scale"])[1]
    values, positional = list(copies.values()), 4 if name == "adamw" else len(copies)
    named = dict(list(copies.items())[positional:])
    return getattr(ops, name)(*values[:positional], **named), copies


def is_refused(name: str, args: Given, place: Callable[[np.ndarray], Any]) -> bool:
    try:
        call(name, args, place)
    except ValueError as error:
        return str(error).startswith(f"{name}: ")
    return False


def in_low_precision(name: str, args: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments in bfloat16, except arrays of the optimizer and statistics, which stay float32."""
    float_only = name in ("adamw", "moving_average", "chunk_squares")
    wide = {entry.name for entry in OPERATIONS[name].signature.entries if float_only or entry.kind == "wide"}
    low = {k: x.dtype == np.float32 and k not in wide for k, x in args.items() if isinstance(x, np.ndarray)}
    return {key: x.astype(BFLOAT16) if low.get(key) else x for key, x in args.items()}
