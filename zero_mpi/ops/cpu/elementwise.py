"""Elementwise operations on CPUs, in one pass each: sums, multiples, GELU, gated pairs, rotary positions."""

from functools import partial
from inspect import signature
from typing import Any

import numpy as np

from zero_mpi.device.arrays import recycled
from zero_mpi.device.types import Array
from zero_mpi.ops import reference
from zero_mpi.ops.cpu.jit import (
    FLOAT32,
    ONE,
    alike,
    bits,
    exponential,
    f4,
    flat,
    helper,
    kernel,
    logistic,
    narrow,
    single,
    wide,
)
from zero_mpi.ops.registry import OPERATIONS, definitions, implements
from zero_mpi.ops.threads import flat_parts, in_parts

TWICE_SCALE = f4(2 * reference.GELU_SCALE)
CUBIC, THRICE_CUBIC = f4(reference.GELU_CUBIC), f4(3 * reference.GELU_CUBIC)


@helper
def gelu_share(x: Any) -> Any:
    """Return GELU(x) / x = (1 + tanh(u)) / 2 = 1 / (1 + e^-2u), where `reference.gelu` has tanh(u)."""
    return logistic(TWICE_SCALE * (x + CUBIC * x * x * x))


@helper
def gelu_slope(x: Any, share: Any) -> Any:
    """Return the derivative of GELU, given share = GELU(x) / x."""
    return share + x * share * (ONE - share) * (TWICE_SCALE * (ONE + THRICE_CUBIC * x * x))


@kernel("l1 l1 l1+")
def add_low(x: Array, y: Array, z: Array) -> None:
    """Compute z = x + y of bfloat16. For float32, NumPy's own loop is equally fast."""
    for i in range(x.size):
        z[i] = narrow(z, wide(x[i]) + wide(y[i]))


@kernel("e1 f e1+")
def multiply(x: Array, factor: float, y: Array) -> None:
    for i in range(x.size):
        y[i] = narrow(y, wide(x[i]) * factor)


@kernel("e1 e1 f e1+")
def multiply_and_add(x: Array, plus: Array, factor: float, y: Array) -> None:
    for i in range(x.size):
        y[i] = narrow(y, wide(x[i]) * factor + wide(plus[i]))


@kernel("e1 e1+")
def gelu_forward(x: Array, y: Array) -> None:
    for i in range(x.size):
        v = wide(x[i])
        y[i] = narrow(y, v * gelu_share(v))


@kernel("e1 e1 e1+")
def gelu_gradient(dy: Array, x: Array, dx: Array) -> None:
    for i in range(x.size):
        v = wide(x[i])
        dx[i] = narrow(dx, wide(dy[i]) * gelu_slope(v, gelu_share(v)))


@kernel("e1 e1 e1+")
def swiglu_forward(gate: Array, up: Array, y: Array) -> None:
    for i in range(gate.size):
        v = wide(gate[i])
        y[i] = narrow(y, v / (ONE + exponential(-v)) * wide(up[i]))


@kernel("e1 e1 e1 e1+ e1+")
def swiglu_gradient(dy: Array, gate: Array, up: Array, dgate: Array, dup: Array) -> None:
    """Compute (dgate, dup) of silu(gate) up."""
    for i in range(gate.size):
        v, d = wide(gate[i]), wide(dy[i])
        s = logistic(v)
        dgate[i] = narrow(dgate, d * wide(up[i]) * s * (ONE + v * (ONE - s)))
        dup[i] = narrow(dup, d * v * s)


@kernel("e1 e1 e1+")
def geglu_forward(gate: Array, up: Array, y: Array) -> None:
    for i in range(gate.size):
        v = wide(gate[i])
        y[i] = narrow(y, v * gelu_share(v) * wide(up[i]))


@kernel("e1 e1 e1 e1+ e1+")
def geglu_gradient(dy: Array, gate: Array, up: Array, dgate: Array, dup: Array) -> None:
    """Compute (dgate, dup) of gelu(gate) up."""
    for i in range(gate.size):
        v, d = wide(gate[i]), wide(dy[i])
        s = gelu_share(v)
        dgate[i] = narrow(dgate, d * wide(up[i]) * gelu_slope(v, s))
        dup[i] = narrow(dup, d * v * s)


@kernel("e3+ f2 f2 b")
def turn_pairs(x: Array, cos: Array, sin: Array, interleaved: bool) -> None:
    """Rotate the pairs of x (B T, H, D) by the angles of their positions; row i is at position i mod T."""
    n, heads = x.shape[:2]
    positions, half = cos.shape
    for i in range(n):
        t = i % positions
        for h in range(heads):
            if interleaved:
                for j in range(half):
                    a, b = wide(x[i, h, 2 * j]), wide(x[i, h, 2 * j + 1])
                    x[i, h, 2 * j] = narrow(x, a * cos[t, j] - b * sin[t, j])
                    x[i, h, 2 * j + 1] = narrow(x, b * cos[t, j] + a * sin[t, j])
            else:
                first, second = x[i, h, :half], x[i, h, half:]
                for j in range(half):
                    a, b = wide(first[j]), wide(second[j])
                    first[j] = narrow(x, a * cos[t, j] - b * sin[t, j])
                    second[j] = narrow(x, b * cos[t, j] + a * sin[t, j])


@implements(reference.add)
def add(x: Array, y: Array) -> Array:
    if not alike(x, y):
        return definitions.add(x, y)
    z = recycled(x.shape, x.dtype)
    if x.dtype == FLOAT32:
        return np.add(x, y, out=z)
    flat_parts(add_low, flat(x), flat(y), flat(z))
    return z


@implements(reference.scale)
def scale(x: Array, factor: float, plus: Array | None = None) -> Array:
    if not alike(x, plus):
        return definitions.scale(x, factor, plus)
    y, multiplier = recycled(x.shape, x.dtype), f4(factor)
    if plus is None:
        flat_parts(lambda x, y: multiply(x, multiplier, y), flat(x), flat(y))
    else:
        flat_parts(lambda x, plus, y: multiply_and_add(x, plus, multiplier, y), flat(x), flat(plus), flat(y))
    return y


def pointwise(kernel: Any, operation: Any, *arguments: Array, **keywords: Array) -> Any:
    """Return the results of an operation on arrays of one shape, by `kernel` or the reference."""
    arrays = (*arguments, *keywords.values())
    if not alike(*arrays):
        return operation.registry[object](*arrays)
    results = [recycled(arrays[0].shape, arrays[0].dtype) for _ in operation.signature.results]
    flat_parts(kernel, *map(flat, (*arrays, *results)))
    return results[0] if len(results) == 1 else tuple(results)


for _name, _kernel in {
    "gelu": gelu_forward,
    "gelu_backward": gelu_gradient,
    "swiglu": swiglu_forward,
    "swiglu_backward": swiglu_gradient,
    "geglu": geglu_forward,
    "geglu_backward": geglu_gradient,
}.items():
    _version: Any = partial(pointwise, _kernel, OPERATIONS[_name])
    _version.__signature__ = signature(getattr(reference, _name))
    implements(getattr(reference, _name))(_version)


@implements(reference.rope)
def rope(x: Array, cos: Array, sin: Array, interleaved: bool, out: Array | None = None) -> Array:
    if not (alike(x, out) and single(cos, sin)) or not (out is None or out.flags.c_contiguous):
        return definitions.rope(x, cos, sin, interleaved, out)
    y = recycled(x.shape, x.dtype) if out is None else out
    if y is not x:
        y[...] = x
    if x.size:
        cos, sin = np.ascontiguousarray(cos), np.ascontiguousarray(sin)
        pairs, per_row = bits(y.reshape(-1, *x.shape[2:])), len(cos) == x.shape[0] * x.shape[1]

        def turn(part: slice) -> None:
            rows = part if per_row else slice(None)
            turn_pairs(pairs[part], cos[rows], sin[rows], interleaved)

        in_parts(pairs.shape, turn, 1 if per_row else len(cos))
    return y
