"""RMSNorm and LayerNorm on a GPU.

Up to 32 neighbouring threads, or up to 256 for wide rows, compute a row. In backward a block computes many
rows and also sums the gradients of w and b. The shape and type alone determine the number of
blocks, so the order of sums is the same on every GPU.
"""

from functools import lru_cache, partial
from typing import Any

from zero_mpi.device.types import Array
from zero_mpi.ops import reference
from zero_mpi.ops.gpu.launch import ARRAY, F32, PACK, THREADS, Family, at, f4, packed, take, writable
from zero_mpi.ops.gpu.sums import add_partials
from zero_mpi.ops.registry import implements
from zero_mpi.ops.sizes import HELD, NORM_LINES, norm_blocks, norm_lanes

RMS_NORM = Family("norm.cu", "rms_norm", "PPPPLLLF")
RMS_NORM_BACKWARD = Family("norm.cu", "rms_norm_backward", "PPPPPPPLLL")
LAYER_NORM = Family("norm.cu", "layer_norm", "PPPPPPLLLF")
LAYER_NORM_BACKWARD = Family("norm.cu", "layer_norm_backward", "PPPPPPPPPLLL")
HELD_TWICE = 3  # HELD for a norm with two gradients, dw and db, as in norm.cu


@lru_cache
def deal(rows: int, width: int, pack: int, per_thread: int) -> tuple[int, int, int, int]:
    """Return (lanes, blocks forward, lines of partial sums, blocks backward)."""
    lanes = norm_lanes(width, pack, per_thread)
    blocks = norm_blocks(rows, lanes)
    lines = min(NORM_LINES, blocks)
    return lanes, blocks, lines, lines * -(-width // (lanes * pack * per_thread))


def forward(family: Family, per_thread: int, x: Array, *rest: Any) -> tuple[Array, ...]:
    """Return y and, for each factor, one float32 statistic per row, from (x, *factors, eps)."""
    *factors, eps = rest
    x, width = packed(x), x.shape[-1]
    y, rows = take(x.shape, x.dtype), x.size // width
    stats = [take((*x.shape[:-1], 1), F32) for _ in factors]
    lanes, blocks, _, _ = deal(rows, width, PACK // x.itemsize, per_thread)
    family[x.dtype](blocks, THREADS, (x, *map(packed, factors), y, *stats, rows, width, lanes, f4(eps)))
    return (y, *stats)


def backward(family: Family, per_thread: int, factors: int, *arguments: Any) -> Array:
    """Return dx from (dy, x, w, *statistics, *gradients, plus); add to the gradient of each factor.

    Gradients and plus may be None; gradients may be float32, bf16 or fp16.
    """
    *inputs, plus = arguments
    inputs, gradients = [packed(x) for x in inputs[:-factors]], inputs[-factors:]
    writable(family.name, *gradients)
    x = inputs[1]
    dx, width = take(x.shape, x.dtype), x.shape[-1]
    rows = x.size // width
    lanes, _, lines, blocks = deal(rows, width, PACK // x.itemsize, per_thread)
    sums = [None if gradient is None else take((lines, width), F32) for gradient in gradients]
    addend = None if plus is None else packed(plus)
    family[x.dtype](blocks, THREADS, (*inputs, at(addend), dx, *map(at, sums), rows, width, lanes))
    pairs = [pair for pair in zip(gradients, sums, strict=True) if pair[0] is not None and rows]
    if len(pairs) == 2 and pairs[0][0].dtype == pairs[1][0].dtype:
        add_partials(*pairs[0], *pairs[1])
    else:
        for pair in pairs:
            add_partials(*pair)
    return dx


implements(reference.rms_norm, ARRAY)(partial(forward, RMS_NORM, HELD))
implements(reference.rms_norm_backward, ARRAY)(partial(backward, RMS_NORM_BACKWARD, HELD, 1))
implements(reference.layer_norm, ARRAY)(partial(forward, LAYER_NORM, HELD_TWICE))
implements(reference.layer_norm_backward, ARRAY)(partial(backward, LAYER_NORM_BACKWARD, HELD_TWICE, 2))
