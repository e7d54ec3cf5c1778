"""Elementwise operations on a GPU: sums, multiples, biases, GELU, SwiGLU, rotary positions.

One pass over memory each, 16 bytes per thread at a time; parts that are not aligned to that, or are shorter,
are processed element by element.
"""

from __future__ import annotations

from zero_mpi.device.types import Array
from zero_mpi.ops import reference
from zero_mpi.ops.gpu.launch import (
    ARRAY,
    PACK,
    THREADS,
    Family,
    at,
    by_rows,
    chosen,
    each_type,
    elements,
    f4,
    packed,
    take,
    tiled,
)
from zero_mpi.ops.registry import implements

ADD = each_type("elementwise.cu", "add", "PPPL")
SCALE = each_type("elementwise.cu", "scale", "PPPFL")
ADD_ROW = each_type("elementwise.cu", "add_row", "PPPPLLLL")
GELU = each_type("elementwise.cu", "gelu", "PPL")
GELU_BACKWARD = each_type("elementwise.cu", "gelu_backward", "PPPL")
SWIGLU = each_type("elementwise.cu", "swiglu", "PPPL")
SWIGLU_BACKWARD = each_type("elementwise.cu", "swiglu_backward", "PPPPPL")
GEGLU = each_type("elementwise.cu", "geglu", "PPPL")
GEGLU_BACKWARD = each_type("elementwise.cu", "geglu_backward", "PPPPPL")
ROPE = {
    True: each_type("elementwise.cu", "rope_interleaved", "PPPPLLLLLLLLL"),
    False: each_type("elementwise.cu", "rope_halves", "PPPPLLLLLLLLL"),
}


@implements(reference.add, ARRAY)
def add(x: Array, y: Array) -> Array:
    kernel, x, y = chosen(ADD, "add", x, y), packed(x), packed(y)
    out = take(x.shape, x.dtype)
    kernel(elements(x), THREADS, (at(x), at(y), at(out), x.size))
    return out


@implements(reference.scale, ARRAY)
def scale(x: Array, factor: float, plus: Array | None = None) -> Array:
    kernel, x = chosen(SCALE, "scale", x, plus), packed(x)
    more, y = None if plus is None else packed(plus), take(x.shape, x.dtype)
    kernel(elements(x), THREADS, (at(x), at(more), at(y), f4(factor), x.size))
    return y


@implements(reference.gelu, ARRAY)
def gelu(x: Array) -> Array:
    kernel, x = chosen(GELU, "gelu", x), packed(x)
    y = take(x.shape, x.dtype)
    kernel(elements(x), THREADS, (at(x), at(y), x.size))
    return y


@implements(reference.gelu_backward, ARRAY)
def gelu_backward(dy: Array, x: Array) -> Array:
    kernel, dy, x = chosen(GELU_BACKWARD, "gelu_backward", x, dy), packed(dy), packed(x)
    dx = take(x.shape, x.dtype)
    kernel(elements(x), THREADS, (at(dy), at(x), at(dx), x.size))
    return dx


@implements(reference.swiglu, ARRAY)
def swiglu(gate: Array, up: Array) -> Array:
    return gated(SWIGLU, "swiglu", gate, up)


@implements(reference.swiglu_backward, ARRAY)
def swiglu_backward(dy: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    return gated_backward(SWIGLU_BACKWARD, "swiglu_backward", dy, gate, up)


@implements(reference.geglu, ARRAY)
def geglu(gate: Array, up: Array) -> Array:
    return gated(GEGLU, "geglu", gate, up)


@implements(reference.geglu_backward, ARRAY)
def geglu_backward(dy: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    return gated_backward(GEGLU_BACKWARD, "geglu_backward", dy, gate, up)


def gated(family: Family, operation: str, gate: Array, up: Array) -> Array:
    """Return the result of an operation for gate and up."""
    kernel, gate, up = chosen(family, operation, gate, up), packed(gate), packed(up)
    y = take(gate.shape, gate.dtype)
    kernel(elements(gate), THREADS, (at(gate), at(up), at(y), gate.size))
    return y


def gated_backward(family: Family, operation: str, dy: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    """Return (dgate, dup) of a gated operation."""
    kernel = chosen(family, operation, gate, up, dy)
    dy, gate, up = packed(dy), packed(gate), packed(up)
    dgate, dup = take(gate.shape, gate.dtype), take(gate.shape, gate.dtype)
    kernel(elements(gate), THREADS, (at(dy), at(gate), at(up), at(dgate), at(dup), gate.size))
    return dgate, dup


@implements(reference.rope, ARRAY)
def rope(x: Array, cos: Array, sin: Array, interleaved: bool, out: Array | None = None) -> Array:
    """Compute `reference.rope`, for a table in float32. x and out may be columns of wider arrays."""
    kernel = chosen(ROPE[bool(interleaved)], "rope", x, out)
    cos, sin = packed(cos), packed(sin)
    x = x if x.strides[-1] == x.itemsize else packed(x)
    y = take(x.shape, x.dtype) if out is None else out
    if y.strides[-1] != y.itemsize:
        raise ValueError("rope: on a GPU the last axis of out must be contiguous; pass such an array")
    (b, t, heads, width), half = x.shape, min(cos.shape[-1], x.shape[-1] // 2)
    if 2 * half < width and y is not x:
        y[..., 2 * half :] = x[..., 2 * half :]
    pairs = PACK // x.itemsize // (2 if interleaved else 1)
    packs = heads * -(-half // pairs)
    steps = [stride // x.itemsize for stride in (*x.strides[:3], *y.strides[:3])]
    if width:
        threads = min(THREADS, -(-packs // 32) * 32)
        kernel(b * t, threads, (at(x), at(y), at(cos), at(sin), t, heads, half, *steps))
    return y


def add_row(b: Array, y: Array, plus: Array | None = None) -> None:
    """Compute y (N, O) += b (O,) [+ plus (N, O)] in place, rounded once. Rows may have a larger stride than
    O.
    """
    kernel, b = chosen(ADD_ROW, "add_row", y, b, plus), packed(b)
    found, rows, width, step = by_rows(y)
    if found is not y:
        raise ValueError("add_row: on a GPU the rows of y must be contiguous; pass such an array")
    more, _, _, more_step = (None, 0, 0, 0) if plus is None else by_rows(plus)
    kernel(
        *tiled(rows, width, PACK // y.itemsize),
        (at(y), at(b), at(more), at(y), width, step, more_step, step),
    )


def rows_and(operation: str, x: Array, b: Array, rows: int) -> Array:
    """Return a new array: x with b added to each of its `rows` equal parts."""
    kernel, x, b = chosen(ADD_ROW, operation, x, b), packed(x), packed(b)
    y, width = take(x.shape, x.dtype), int(b.size)
    kernel(*tiled(rows, width, PACK // x.itemsize), (at(x), at(b), 0, at(y), width, width, 0, width))
    return y
