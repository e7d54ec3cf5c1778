"""Elementwise operations on a GPU: sums, multiples, biases, GELU, GeGLU, SwiGLU, rotary positions.

Each operation makes one pass over memory, in packs of 16 bytes per thread. Unaligned or shorter parts are
processed element by element.
"""

from functools import partial
from typing import Any

from zero_mpi.device.types import Array
from zero_mpi.ops import reference
from zero_mpi.ops.gpu.launch import ARRAY, PACK, THREADS, Family, at, elements, f4, packed, take
from zero_mpi.ops.registry import OPERATIONS, implements

POINTWISE = "add", "gelu", "gelu_backward", "swiglu", "swiglu_backward", "geglu", "geglu_backward"
SCALE = Family("elementwise.cu", "scale", "PPPFL")
ADD_ROW = Family("elementwise.cu", "add_row", "PPPPLLLL")
ROPE = {
    True: Family("elementwise.cu", "rope_interleaved", "PPPPLLLLLLLLL"),
    False: Family("elementwise.cu", "rope_halves", "PPPPLLLLLLLLL"),
}


def pointwise(family: Family, results: int, *inputs: Array) -> Any:
    """Return the results of an operation on arrays of one shape."""
    arrays = [packed(x) for x in inputs]
    last = arrays[-1]
    arrays += [take(last.shape, last.dtype) for _ in range(results)]
    family[last.dtype](elements(last), THREADS, (*arrays, last.size))
    return arrays[-1] if results == 1 else tuple(arrays[-results:])


for _name in POINTWISE:
    _signature = OPERATIONS[_name].signature
    _results = len(_signature.results)
    _family = Family("elementwise.cu", _name, "P" * (len(_signature.entries) + _results) + "L")
    implements(getattr(reference, _name), ARRAY)(partial(pointwise, _family, _results))


@implements(reference.scale, ARRAY)
def scale(x: Array, factor: float, plus: Array | None = None) -> Array:
    kernel, x = SCALE[x.dtype], packed(x)
    addend, y = None if plus is None else packed(plus), take(x.shape, x.dtype)
    kernel(elements(x), THREADS, (x, at(addend), y, f4(factor), x.size))
    return y


@implements(reference.rope, ARRAY)
def rope(x: Array, cos: Array, sin: Array, interleaved: bool, out: Array | None = None) -> Array:
    """Compute `reference.rope`; cos and sin are float32. x and out may be columns of wider arrays."""
    kernel = ROPE[bool(interleaved)][x.dtype]
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
        kernel(b * t, threads, (x, y, cos, sin, t, heads, half, *steps))
    return y
