"""Where kernels put sums over rows: into the gradient of a bias or norm, or beside it where that is low."""

from __future__ import annotations

import numpy as np

from zero_mpi.device.types import Array
from zero_mpi.ops.cpu.jit import BFLOAT16, FLOAT32


def sums_for(dw: Array | None, w: Array) -> Array:
    """What a kernel adds sums over rows to: dw itself, or zeros, which `add_sums` brings there.

    For a frozen parameter as well, so that the same code runs and dx has the same bits.
    """
    return dw if dw is not None and dw.dtype == FLOAT32 else np.zeros(w.shape, np.float32)


def add_sums(sums: Array, dw: Array | None) -> None:
    """Add what lies beside a gradient of low precision to it, rounded once."""
    if dw is not None and dw is not sums:
        dw[...] = dw.astype(np.float32) + sums


def adds_into(*sums: Array | None) -> bool:
    """Whether kernels can add into these where they lie, or beside them."""
    return all(x is None or (x.dtype in (FLOAT32, BFLOAT16) and x.flags.c_contiguous) for x in sums)
