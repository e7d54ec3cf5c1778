"""One call of each operation that fits, with every argument given, and the calls beside it that do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from zero_mpi import ops
from zero_mpi.ops.low_precision import BFLOAT16

Given = dict[str, Any]
RATES = {"grad_scale": 1.0, "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "step": 1}


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def of_experts() -> dict[str, Given]:
    """Those of the operations of experts."""
    rows, ends = numbers(6, 4), np.array([0, 2, 2, 6])
    experts, weight = {"w": numbers(3, 4, 5), "starts": ends}, np.ones((6, 1), np.float32)
    routed = {"p": numbers(3, 4), "chosen": np.array([[0, 1], [1, 2], [2, 0]]), "rows": np.arange(6)}
    x, w, h = numbers(2, 3, 5), numbers(8, 5), numbers(2, 3, 8)
    return {
        "linear_wide": {"x": x, "w": w, "plus": h},
        "route": {"logits": numbers(3, 4), "used": 2, "normalized": True},
        "route_backward": {"dw": weight, "w": weight + 1, **routed, "normalized": True},
        "weighted_swiglu": {"gate": rows, "up": rows + 1, "w": weight},
        "weighted_swiglu_backward": {"dy": rows, "gate": rows + 1, "up": rows + 2, "w": weight},
        "grouped_linear": {"x": numbers(6, 5), **experts, "plus": rows},
        "grouped_linear_backward_x": {"dy": rows, **experts, "into": numbers(6, 5)},
        "grouped_linear_backward_w": {"dy": rows, "x": numbers(6, 5), "dw": numbers(3, 4, 5), "starts": ends},
    }


def fitting() -> dict[str, Given]:
    """The arguments of each operation by name, arrays as new ones: no two axes of an array are alike."""
    x, w, c, h = numbers(2, 3, 5), numbers(8, 5), numbers(5), numbers(2, 3, 8)
    row, tokens = np.ones((2, 3, 1), np.float32), np.array([[3, 0, 3], [1, 2, 1]])
    turns = {"cos": numbers(3, 3), "sin": numbers(3, 3) + 1}
    added = {"dw": c + 1, "db": c + 2, "plus": x + 2}
    heads = {"q": numbers(2, 3, 4, 6), "k": numbers(2, 7, 2, 6), "v": numbers(2, 7, 2, 5)}
    flat = {name: numbers(35) for name in "pgm"} | {"v": numbers(35) ** 2}
    head = {"x": x, "w": w, "b": numbers(8), "targets": tokens, "scale": 0.5}
    return of_experts() | {
        "add": {"x": x, "y": x + 1},
        "scale": {"x": x, "factor": 0.3, "plus": x + 1},
        "linear": {"x": x, "w": w, "b": numbers(8), "plus": h},
        "linear_backward_x": {"dy": h, "w": w, "into": x.copy()},
        "linear_backward_w": {"dy": h, "x": x, "dw": numbers(8, 5)},
        "linear_backward_b": {"dy": h, "db": numbers(8)},
        "embedding": {"tokens": tokens, "w": w},
        "embedding_backward": {"tokens": tokens, "dy": x, "dw": numbers(8, 5)},
        "positions": {"x": x, "w": numbers(3, 5)},
        "positions_backward": {"dy": x, "dw": numbers(3, 5)},
        "rms_norm": {"x": x, "w": c, "eps": 0.1},
        "rms_norm_backward": {"dy": x, "x": x + 1, "w": c, "r": row, "dw": c + 1, "plus": x + 2},
        "layer_norm": {"x": x, "w": c, "b": c + 1, "eps": 0.1},
        "layer_norm_backward": {"dy": x, "x": x + 1, "w": c, "mean": 0 * row, "r": row} | added,
        "gelu": {"x": x},
        "gelu_backward": {"dy": x, "x": x + 1},
        "swiglu": {"gate": x, "up": x + 1},
        "swiglu_backward": {"dy": x, "gate": x + 1, "up": x + 2},
        "geglu": {"gate": x, "up": x + 1},
        "geglu_backward": {"dy": x, "gate": x + 1, "up": x + 2},
        "rope": {"x": heads["q"], **turns, "interleaved": False, "out": numbers(2, 3, 4, 6)},
        "causal_attention": {**heads, "scale": 0.7, "begins": np.array([[0, 0, 1], [0, 2, 2]])},
        "causal_attention_backward": {"dy": numbers(2, 3, 4, 5), **heads, "kept": None, "scale": 0.7},
        "cross_entropy": {"logits": h, "targets": tokens, "scale": 0.5},
        "linear_cross_entropy": {**head, "dw": w + 1, "db": numbers(8)},
        "adamw": {**flat, **RATES, "decay": np.zeros(5), "low": numbers(35)},
        "moving_average": {"e": numbers(35), "p": numbers(35) + 1, "keep": 0.9},
        "chunk_squares": {"g": numbers(35), "chunk": 5},
        "dequantize": {"raw": np.zeros(3 * 34, np.uint8), "kind": "Q8_0", "out": numbers(3 * 32)},
    }


# What fits too, by (operation, argument): other lengths of these axes, `more` or `fewer` axes. No more does.
FREE: dict[tuple[str, str], tuple[Any, ...]] = {
    ("linear_backward_b", "dy"): (0, 1, "more", "fewer"),
    ("gelu", "x"): (0, 1, 2, "more", "fewer"),
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
    """(axis or word, an array that differs in it): axes that are longer or shorter, more or fewer; types."""
    for axis in range(x.ndim):
        yield from ((axis, resized(x, axis, by)) for by in (-1, 1) if x.shape[axis] + by)
    yield "more", x[None]
    yield "fewer", x[0]
    other = {"f": np.int64, "i": np.float32, "u": np.int8}[x.dtype.kind]
    yield "type", x.astype(other)
    yield "type", x.astype(np.complex64)


def calls(name: str) -> Iterator[tuple[str, bool, Given]]:
    """(label, whether it fits, arguments) of each call that differs from the fitting one in one array."""
    for argument, whole in fitting()[name].items():
        if isinstance(whole, np.ndarray):
            for what, other in changed(whole):
                given = fitting()[name] | {argument: other}
                yield (
                    f"{argument} {what} {other.shape} {other.dtype}",
                    what in FREE.get((name, argument), ()),
                    given,
                )


def call(name: str, given: Given, place: Callable[[np.ndarray], Any]) -> tuple[Any, Given]:
    there = {k: place(x) if isinstance(x, np.ndarray) and k != "decay" else x for k, x in given.items()}
    if name == "causal_attention_backward" and there["kept"] is None:
        dtype = BFLOAT16 if given["q"].dtype == BFLOAT16 else np.float32
        inputs = (place(fitting()[name][key].astype(dtype)) for key in "qkv")
        there["kept"] = ops.causal_attention(*inputs, there["scale"])[1]
    values, positional = list(there.values()), 4 if name == "adamw" else len(there)
    named = dict(list(there.items())[positional:])
    return getattr(ops, name)(*values[:positional], **named), there


def is_refused(name: str, given: Given, place: Callable[[np.ndarray], Any]) -> bool:
    try:
        call(name, given, place)
    except ValueError as error:
        return str(error).startswith(f"{name}: ")
    return False
