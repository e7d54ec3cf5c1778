"""A stable sort of keys by some of their bits on a GPU.

CuPy has a sort too, but that one waits for the GPU and takes memory of its own; this one is asked for like
any kernel. It is for tens of thousands of keys: tokens of a micro-batch.
"""

from __future__ import annotations

import numpy as np

from zero_mpi.device.types import Array
from zero_mpi.ops.gpu.launch import THREADS, at, kernel, take

DIGIT_COUNTS = kernel("sort.cu", "digit_counts", "PPLL")
COUNTS_BEFORE = kernel("sort.cu", "counts_before", "PL")
BY_DIGIT = kernel("sort.cu", "by_digit", "PPPLL")
BITS = 8  # of a digit: there are as many digits as a block has threads
THREADS_OF_A_SUM = 1024


def sort_by_bits(keys: Array, first: int, last: int) -> Array:
    """Return keys (n,) of 64 bits ordered by their bits [first, last); keys equal there stay in order.

    The array given is used as scratch space: use the result instead.
    """
    size, other = int(keys.size), take(keys.shape, keys.dtype)
    blocks = -(-size // THREADS)
    counts = take((blocks << BITS,), np.uint32)
    for shift in range(first, last, BITS):
        DIGIT_COUNTS(blocks, THREADS, (at(keys), at(counts), size, shift))
        COUNTS_BEFORE(1, THREADS_OF_A_SUM, (at(counts), int(counts.size)))
        BY_DIGIT(blocks, THREADS, (at(keys), at(other), at(counts), size, shift))
        keys, other = other, keys
    return keys
