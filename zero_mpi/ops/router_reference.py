"""Auxiliary losses of routers in plain array code: T tokens, N experts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from zero_mpi.device.types import Array
from zero_mpi.ops.elementary import chosen, log_of_array
from zero_mpi.ops.rowsums import column_sums

ROWS = 1024  # of a temporary array
log: Callable[[Array], Array] = chosen(log_of_array, np.log)


def log_sums(logits: Array, p: Array) -> Array:
    """Return log(sum(exp(logits))) of each row of logits (T, N), by their softmax p; (T,)."""
    return logits.max(axis=-1) - log(p.max(axis=-1)).astype(p.dtype)


def router_losses(logits: Array, p: Array) -> tuple[Array, Array]:
    """Return the sums over tokens of p (T, N), softmax of logits, and of log(sum(exp(logits)))^2."""
    return column_sums(p), (log_sums(logits, p) ** 2).sum(dtype=np.float64)


def router_losses_backward(dlogits: Array, logits: Array, p: Array, slope: Array, z: float) -> None:
    """Add to dlogits (T, N) in place: the gradient of sum(p @ slope) + z * sum(log(sum(exp(logits)))^2)."""
    for start in range(0, len(p), ROWS):
        part = slice(start, start + ROWS)
        row = column_sums((p[part] * slope).T)
        if z:
            row = row - 2 * z * log_sums(logits[part], p[part])
        dlogits[part] += p[part] * (slope - row[:, None])
