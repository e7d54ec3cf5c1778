"""Flat buffers on CPUs: AdamW in one pass, and the sums of squares of a gradient's chunks.

Results must not depend on how a buffer is cut. AdamW is therefore compiled without fast-math, so that the
vector part of a loop and its remainder round equally. The order of a chunk's sum depends only on its length.
"""

import math

import numpy as np

from zero_mpi.device.types import Array
from zero_mpi.ops import reference
from zero_mpi.ops.cpu.jit import BFLOAT16, bits, kernel, narrow, single
from zero_mpi.ops.elementary import power
from zero_mpi.ops.registry import implements
from zero_mpi.ops.sizes import run_length
from zero_mpi.ops.threads import in_parts

NOTHING = np.zeros(0, np.uint16)


@kernel("f1+ f1 f1+ f1+ f1 l1+ f f f f f f f f", liberties=False)
def update(
    p: Array,
    g: Array,
    m: Array,
    v: Array,
    keep: Array,
    low: Array,
    scale: float,
    beta1: float,
    rest1: float,
    beta2: float,
    rest2: float,
    root_c2: float,
    eps: float,
    rate: float,
) -> None:
    """Compute the update of `reference.adamw`, element by element.

    keep (n,): 1 - lr * decay for each of the n equally long runs of p. low: receives p rounded to bfloat16
    while p is in cache, or is empty."""
    if keep.size == 0:
        return
    length = p.size // keep.size
    for run in range(keep.size):
        factor, part = keep[run], slice(run * length, (run + 1) * length)
        pr, gr, mr, vr = p[part], g[part], m[part], v[part]  # a loop over separate arrays is vectorized
        for i in range(pr.size):
            d = gr[i] * scale
            first = mr[i] * beta1 + rest1 * d
            second = vr[i] * beta2 + rest2 * (d * d)
            mr[i] = first
            vr[i] = second
            pr[i] = pr[i] * factor - rate * (first / (np.sqrt(second) / root_c2 + eps))
        if low.size:
            rounded = low[part]
            for i in range(pr.size):
                rounded[i] = narrow(low, pr[i])


@kernel("f1+ f1 f f", liberties=False)
def move_average(e: Array, p: Array, keep: float, rest: float) -> None:
    for i in range(e.size):
        e[i] = e[i] * keep + rest * p[i]


@kernel("f1 i d1+", liberties={"reassoc", "contract"})
def add_squares(g: Array, chunk: int, sums: Array) -> None:
    """Set sums[i] to the float64 sum of squares of chunk i; a chunk has `chunk` elements."""
    for i in range(sums.size):
        run = g[i * chunk : (i + 1) * chunk]
        total = 0.0
        for j in range(run.size):
            total += np.float64(run[j]) * np.float64(run[j])
        sums[i] = total


@implements(reference.adamw)
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
    if not single(p, g, m, v) or not all(array.flags.c_contiguous for array in (p, g, m, v)):
        rates = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "decay": decay}
        reference.adamw(p, g, m, v, grad_scale=grad_scale, step=step, low=low, **rates)
        return
    root_c2 = math.sqrt(1.0 - power(beta2, step))
    rate = lr / (1.0 - power(beta1, step))
    numbers = np.array((grad_scale, beta1, 1.0 - beta1, beta2, 1.0 - beta2, root_c2, eps, rate), np.float32)
    keep = (1.0 - lr * decay).astype(np.float32)
    rounded = bits(low) if low is not None and low.dtype == BFLOAT16 and low.flags.c_contiguous else NOTHING
    run = run_length(p, keep)

    def work(runs: slice) -> None:
        part = slice(runs.start * run, runs.stop * run)
        update(p[part], g[part], m[part], v[part], keep[runs], rounded[part], *numbers)

    in_parts((keep.size, run), work)
    if low is not None and rounded is NOTHING:
        low[...] = p


@implements(reference.moving_average)
def moving_average(e: Array, p: Array, keep: float) -> None:
    if not single(e, p) or not (e.flags.c_contiguous and p.flags.c_contiguous):
        reference.moving_average(e, p, keep)
        return
    numbers = np.array([keep, 1.0 - keep], np.float32)
    in_parts((e.size, 1), lambda part: move_average(e[part], p[part], *numbers))


@implements(reference.chunk_squares)
def chunk_squares(g: Array, chunk: int) -> Array:
    if not single(g) or not g.flags.c_contiguous:
        return reference.chunk_squares(g, chunk)
    sums = np.empty(g.size // chunk, np.float64)
    in_parts((sums.size, chunk), lambda part: add_squares(g[part.start * chunk :], chunk, sums[part]))
    return sums
