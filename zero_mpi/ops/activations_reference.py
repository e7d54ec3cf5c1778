"""Definitions of elementwise activations and gated activations, with the conventions of `reference`."""

import math

from zero_mpi.device.arrays import namespace
from zero_mpi.device.types import Array
from zero_mpi.ops.registry import operation

GELU_SCALE = math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715


@operation("x ... -> ...")
def gelu(x: Array) -> Array:
    """Return the tanh form of GELU, elementwise, as in GPT-2 and llama.cpp (Hendrycks and Gimpel, 2016)."""
    xp = namespace(x)
    return 0.5 * x * (1.0 + xp.tanh(GELU_SCALE * (x + GELU_CUBIC * x * x * x)))


@operation("dy ..., x ... -> ...")
def gelu_backward(dy: Array, x: Array) -> Array:
    """Return the gradient dx of `gelu`."""
    xp = namespace(x)
    t = xp.tanh(GELU_SCALE * (x + GELU_CUBIC * x * x * x))
    slope = GELU_SCALE * (1.0 + 3.0 * GELU_CUBIC * x * x)
    return dy * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope)


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x)), computed by tanh, which does not overflow."""
    xp = namespace(x)
    return 0.5 + 0.5 * xp.tanh(0.5 * x)


@operation("gate ..., up ... -> ...")
def swiglu(gate: Array, up: Array) -> Array:
    """Return silu(gate) * up, elementwise (Shazeer, "GLU Variants Improve Transformer", 2020)."""
    return gate * sigmoid(gate) * up


@operation("dy ..., gate ..., up ... -> ..., ...")
def swiglu_backward(dy: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    """Return (dgate, dup) of `swiglu`."""
    s = sigmoid(gate)
    silu = gate * s
    return dy * up * (s + silu * (1.0 - s)), dy * silu


@operation("gate ..., up ... -> ...")
def geglu(gate: Array, up: Array) -> Array:
    """Return gelu(gate) * up, elementwise (Shazeer, 2020)."""
    return gelu(gate) * up


@operation("dy ..., gate ..., up ... -> ..., ...")
def geglu_backward(dy: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    """Return (dgate, dup) of `geglu`."""
    return gelu_backward(dy * up, gate), dy * gelu(gate)
