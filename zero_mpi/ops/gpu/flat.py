"""Operations on flat buffers on a GPU: AdamW in one pass, and sums of squares of chunks.

Results depend neither on how a buffer is cut nor on the GPU. AdamW is bit-identical to the reference.
"""

import math

from zero_mpi import device
from zero_mpi.device.types import Array
from zero_mpi.ops import reference
from zero_mpi.ops.elementary import power
from zero_mpi.ops.gpu.launch import ARRAY, F32, F64, Family, Kernel, at, elements, f4, packed, take, writable
from zero_mpi.ops.registry import implements
from zero_mpi.ops.sizes import THREADS, run_length

ADAMW = Family("flat.cu", "adamw", "PPPPPPLLLDFFFFFFFF")
CHUNK_SQUARES = Kernel("flat.cu", "chunk_squares", "PPLL")
WARP = 32


def single(operation: str, *arrays: Array) -> None:
    """Raise ValueError for arrays that are not float32 and contiguous."""
    if any(x.dtype != F32 or not x.flags.c_contiguous for x in arrays):
        actual = ", ".join(f"{x.dtype}{'' if x.flags.c_contiguous else ' with gaps'}" for x in arrays)
        raise ValueError(f"{operation}: on a GPU expected contiguous arrays of float32; got {actual}")


@implements(reference.adamw, ARRAY)
def adamw(
    p: Array,
    g: Array,
    m: Array,
    v: Array,
    *,
    grad_scale: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: Array,
    step: int,
    low: Array | None = None,
) -> None:
    """Compute `reference.adamw`, bit for bit. p, g, m and v are float32; `low` has any of the three types."""
    single("adamw", p, g, m, v)
    writable("adamw", low)
    size, run = int(p.size), run_length(p, decay)
    runs = packed(device.in_use().from_host(decay))
    shift = run.bit_length() - 1 if run & (run - 1) == 0 else -1
    root_c2, rate = math.sqrt(1.0 - power(beta2, step)), lr / (1.0 - power(beta1, step))
    numbers = (grad_scale, beta1, 1.0 - beta1, beta2, 1.0 - beta2, root_c2, eps, rate)
    arguments = (p, g, m, v, runs, at(low), size, run, shift, float(lr), *map(f4, numbers))
    ADAMW[(p if low is None else low).dtype](elements(p), THREADS, arguments)


@implements(reference.chunk_squares, ARRAY)
def chunk_squares(g: Array, chunk: int) -> Array:
    single("chunk_squares", g)
    count = int(g.size) // chunk
    sums = take((count,), F64)
    CHUNK_SQUARES(-(-count // (THREADS // WARP)), THREADS, (g, sums, count, chunk))
    return sums
