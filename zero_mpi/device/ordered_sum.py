"""Sums in a fixed order, bit-identical on the host and on a GPU, where small kernels compute them.

Transports use this module and not `ops`, because they add arriving chunks on a different stream, and
because `comm` does not import `ops`.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from zero_mpi.device import import_cupy, in_use, is_cupy, libraries
from zero_mpi.device.types import Array

SOURCE = Path(__file__).with_suffix(".cu")
OPTIONS = ("-std=c++17",)
KINDS, PAIRWISE = ("float32", "bfloat16", "float16"), "pairwise_sums"
LEAF = 128  # NumPy halves longer vectors to sum them
MAX_PARTS = 8  # maximum number of parts that one launch adds, as in the CUDA source
THREADS, BLOCKS = 256, 1024  # threads per block; maximum number of blocks, enough to fill any GPU
PER_THREAD = 4  # elements that a thread adds at a time


@cache
def kernels() -> dict[Any, Any]:
    """Return the GPU kernels: a sum for each type of parts, and PAIRWISE."""
    module = import_cupy().RawModule(code=SOURCE.read_text(), options=OPTIONS)
    with libraries():
        sums = {np.dtype(kind): module.get_function(f"add_{kind}") for kind in KINDS}
        return sums | {PAIRWISE: module.get_function(PAIRWISE)}


def ordered_sum_on_gpu(out: Array, parts: Sequence[Array], accumulate: bool, stream: Any) -> None:
    """Set out = parts[0] + parts[1] + ..., or out + parts[0] + ... if `accumulate`, on a stream.

    `out` is float32. The parts have the length of `out` and one type: float32, bfloat16 or float16.
    """
    assert out.dtype == np.float32, "sums are float32"
    if not out.size:
        return
    kernel = kernels()[parts[0].dtype if parts else out.dtype]
    blocks = min(BLOCKS, -(-int(out.size) // (THREADS * PER_THREAD)))
    for first in range(0, max(1, len(parts)), MAX_PARTS):
        group = parts[first : first + MAX_PARTS]
        places = [*group, *[group[0] if group else out] * (MAX_PARTS - len(group))]
        numbers = np.int32(len(group)), np.int32(accumulate or first > 0), np.int64(out.size)
        kernel((blocks,), (THREADS,), (out, *places, *numbers), stream=stream)


def ordered_sum(out: Array, parts: list[Array], accumulate: bool) -> None:
    """Set out = parts[0] + ..., or out + parts[0] + ... if `accumulate`, from left to right, in place.

    Parts in low precision are widened before they are added.
    """
    if is_cupy(out):
        ordered_sum_on_gpu(out, parts, accumulate, in_use().stream)
        return
    if not accumulate and len(parts) > 1 and parts[0].dtype == out.dtype:
        np.add(parts[0], parts[1], out=out)
        parts = parts[2:]
    elif not accumulate:
        out[...] = parts[0] if parts else 0
        parts = parts[1:]
    for part in parts:
        np.add(out, part, out=out)


def pairwise_sums(x: Array, segments: Array) -> Array:
    """Return NumPy's float64 sums of x[start : start + length], bit-identical on a GPU.

    segments (2, N): the starts, and the lengths, which are at most LEAF.
    """
    count = segments.shape[1]
    if is_cupy(x):
        sums, blocks = in_use().empty(count, np.float64), -(-count * 8 // THREADS)
        kernel = kernels()[PAIRWISE]
        kernel((blocks,), (THREADS,), (x, segments, sums, np.int64(count)), stream=in_use().stream)
        return sums
    sums, (starts, lengths) = np.empty(count), segments
    for length in np.unique(lengths):
        mask = lengths == length
        sums[mask] = sliding_window_view(x, length)[starts[mask]].sum(axis=1)
    return sums
