"""A short trial that shows whether two machines give bit-identical results for all operations.

Comparing names is not enough: OpenBLAS has one name for Zen 5 and Intel's AVX-512 cores, compiled code
depends on the processor, and products depend on the number of threads. So each operation runs, by the same
code as in training, on numbers made by integer arithmetic, and the results are hashed. Products have, in
forward and both backwards, the shapes for which libraries have special kernels: odd edges, a single row, sums
longer than a block, and sizes that are divided among threads. Nothing depends on the rank, the job or the
model. Unpacking quantized blocks is not tried: it adds nothing up, and the format defines its results.
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np

from zero_mpi import device, ops
from zero_mpi.device.arrays import pool_of
from zero_mpi.device.types import Array
from zero_mpi.ops import signatures
from zero_mpi.ops.registry import OPERATIONS

# (rows, inputs, outputs) of linear layers. OpenBLAS has special kernels for products of up to a million
# multiplications, splits sums of a few hundred terms, and divides large products: all three occur here.
PRODUCTS = (
    (1, 96, 65), (7, 33, 130), (64, 64, 64), (96, 192, 576), (64, 1040, 200), (520, 96, 72), (160, 264, 700)
)  # fmt: skip
# (sequences, positions, heads, key/value heads, width of a head). Only the first shape keeps its weights.
ATTENTIONS = ((2, 70, 4, 2, 32), (1, 1100, 1, 1, 24))
STREAM = 1 << 18  # more numbers than the largest array needs, even for the largest seed
ROWS, WIDTH = 67, 193  # sizes for operations on rows: not multiples of a vector or an unrolled loop
VOCABULARY = 301
SIZES = {"...": (ROWS,), "1": 1, "B": 2, "C": WIDTH, "D": 22, "E": 11, "H": 3, "O": WIDTH, "T": 9}
SIZES["V"] = VOCABULARY
RANGE = 9  # numbers up to RANGE cover the useful range of the exponential
IN_PARTS = {"linear", "linear_backward_x", "linear_backward_w", "linear_backward_b", "linear_cross_entropy"}
IN_PARTS |= {"causal_attention", "causal_attention_backward", "adamw", "moving_average", "chunk_squares"}
IN_PARTS |= {"route", "route_backward", "grouped_linear", "grouped_linear_backward_x", "dequantize"}
IN_PARTS |= {"grouped_linear_backward_w"}

Draw = Callable[..., Array]  # `numbers` for one type


@cache
def stream() -> Array:
    """Return numbers between -1 and 1, bit-identical on all machines: they use no library's generator."""
    bits = np.arange(STREAM, dtype=np.uint32) * np.uint32(2654435761)
    bits ^= bits >> np.uint32(15)
    bits *= np.uint32(2246822519)
    bits ^= bits >> np.uint32(13)
    return (bits >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)


def numbers(*shape: int, seed: int, times: float = 1, kind: Any = np.float32) -> Array:
    """Return numbers from `stream`, multiplied by `times`, as type `kind`; `seed` selects the first."""
    start = 997 * seed
    values = stream()[start : start + math.prod(shape)].reshape(shape) * np.float32(times)
    return device.in_use().from_host(values.astype(kind))


def whole(count: int, *shape: int) -> Array:
    """Return an array of integers below `count`, in scattered order."""
    values = np.arange(math.prod(shape), dtype=np.int64) * 7919 % count
    return device.in_use().from_host(values.reshape(shape))


def products(draw: Draw) -> Iterator[Array]:
    """Yield the results of the linear layer in every shape, forward and backward."""
    for rows, inputs, outputs in PRODUCTS:
        x, w, b = draw(rows, inputs, seed=1), draw(outputs, inputs, seed=2), draw(outputs, seed=3)
        y = ops.linear(x, w, b, draw(rows, outputs, seed=4))
        dw, db = draw(outputs, inputs, seed=5), draw(outputs, seed=6)
        ops.linear_backward_w(y, x, dw)
        ops.linear_backward_b(y, db)
        yield from (ops.linear(x, w, b), y, ops.linear_backward_x(y, w), dw, db)
        yield ops.linear_backward_x(y, w, draw(rows, inputs, seed=7))


def attention(draw: Draw) -> Iterator[Array]:
    """Yield the results of attention, forward and backward."""
    for batch, length, heads, shared, width in ATTENTIONS:
        q = draw(batch, length, heads, width, seed=1)
        k, v = (draw(batch, length, shared, width, seed=seed) for seed in (2, 3))
        y, saved = ops.causal_attention(q, k, v, width**-0.5)
        yield y
        yield from ops.causal_attention_backward(draw(*y.shape, seed=4), q, k, v, saved, width**-0.5)


def head(draw: Draw) -> Iterator[Array]:
    """Yield the loss of an output head, and its gradients."""
    targets, x = whole(VOCABULARY, ROWS), draw(ROWS, WIDTH, seed=1)
    w, b = draw(VOCABULARY, WIDTH, seed=3), draw(VOCABULARY, seed=4)
    dw, db = draw(VOCABULARY, WIDTH, seed=5), draw(VOCABULARY, seed=6)
    yield from ops.linear_cross_entropy(x, w, b, targets, 0.01, dw, db)
    yield from (dw, db)


def experts(draw: Draw) -> Iterator[Array]:
    """Yield the results of routing, and of products of rows sorted by expert."""
    x, w, gate = draw(2 * ROWS, WIDTH, seed=1), draw(5, 64, WIDTH, seed=2), draw(2 * ROWS, 64, seed=3)
    logits = draw(ROWS, 5, seed=4)
    logits = numbers(ROWS, 5, seed=4) if logits.itemsize < 4 else logits  # a router needs float32
    for normalized in (True, False):
        p, chosen, rows, _, weights, starts = ops.route(logits, 2, normalized)
        dw = draw(2 * ROWS, 1, seed=5)
        yield from (p, weights, ops.route_backward(dw, weights, p, chosen, rows, normalized))
    total = draw(5, 64, WIDTH, seed=6)
    ops.grouped_linear_backward_w(gate, x, total, starts)
    yield from (ops.grouped_linear(x, w, starts), ops.grouped_linear_backward_x(gate, w, starts), total)


def others(draw: Draw) -> Iterator[Array]:
    """Yield the results of every other operation, with and without optional arguments."""

    def fill(shape: tuple[int, ...], kind: str, number: int, limit: int) -> Array:
        if kind == "whole":
            return whole(limit, *shape)
        values = draw(*shape, seed=number, times=RANGE)
        return numbers(*shape, seed=number, times=RANGE) if kind == "wide" and values.itemsize < 4 else values

    for name, operation in OPERATIONS.items():
        for full, flag in () if name in IN_PARTS else itertools.product((True, False), repeat=2):
            arguments = signatures.example(operation, SIZES, fill, full)
            result = getattr(ops, name)(*(flag if value is False else value for value in arguments.values()))
            values = (*arguments.values(), *(result if isinstance(result, tuple) else (result,)))
            yield from (x for x in values if hasattr(x, "dtype"))


def updates() -> Iterator[Array]:
    """Yield the results of the optimizer, and the sums of squares for the gradient norm."""
    p, g, m = (numbers(3072, seed=seed) for seed in (1, 2, 3))
    v, decay = numbers(3072, seed=4) ** 2, np.array([0.1, 0.0, 0.1])
    yield ops.chunk_squares(g, 1024)
    rates: dict[str, Any] = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "decay": decay}
    ops.adamw(p, g, m, v, grad_scale=0.3, step=3, **rates)
    ops.moving_average(m, p, 0.9)
    yield from (p, m, v)


PARTS = (products, attention, head, experts, others)


def results(kind: Any) -> Iterator[Array]:
    """Yield the results of all operations in float32, and in a run's low-precision type, if it has one."""
    for part in PARTS:
        yield from part(numbers)
    yield from updates()
    for part in PARTS if kind != np.float32 else ():
        yield from part(partial(numbers, kind=kind))


def digest(kind: Any = np.float32) -> str:
    """Return a short hash of the bits of all results. The trial takes tens of milliseconds."""
    hasher = hashlib.sha256()
    home = device.in_use()
    for result in results(kind):
        hasher.update(np.ascontiguousarray(home.to_host(result)).tobytes())
    pool_of(home).trim()  # free the buffers, whose sizes training does not use
    stream.cache_clear()
    return hasher.hexdigest()[:16]
