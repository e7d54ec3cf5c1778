"""Targets of kernels' sums over rows: the gradient of a bias or norm, or a float32 buffer if it is low."""

from __future__ import annotations

import numpy as np

from zero_mpi.device.types import Array
from zero_mpi.ops.cpu.jit import BFLOAT16, FLOAT32


def sums_for(dw: Array | None, w: Array) -> Array:
    """Return the array to which a kernel adds sums over rows: dw, or zeros that `add_sums` adds to dw.

    A frozen parameter gets one as well, so that the same code runs and dx has the same bits.
    """
    return dw if dw is not None and dw.dtype == FLOAT32 else np.zeros(w.shape, np.float32)


def add_sums(sums: Array, dw: Array | None) -> None:
    """Add separate float32 sums to a gradient of low precision, rounded once."""
    if dw is not None and dw is not sums:
        dw[...] = dw.astype(np.float32) + sums


def adds_into(*sums: Array | None) -> bool:
    """Return whether kernels can add to these in place, or by a float32 buffer."""
    return all(x is None or (x.dtype in (FLOAT32, BFLOAT16) and x.flags.c_contiguous) for x in sums)
