"""The order in which gradients of biases and norms are summed over rows: a definition like `reference`.

One sum over thousands of rows loses a bit when their number grows fourfold. So of each LANES * LANE_ROWS
rows, row i goes to lane i mod LANES, the lanes are added in pairs, and these short sums one after the other.
The order follows from the number of rows alone. Blocks of a GPU have their own order, with sums as short.
"""

from __future__ import annotations

from zero_mpi.device.arrays import namespace
from zero_mpi.device.types import Array

LANES, LANE_ROWS = 4, 16


def column_sums(x: Array) -> Array:
    """Return the sum of x (N, O) over its rows, (O,)."""
    xp, (n, width) = namespace(x), x.shape
    parts = -(-n // (LANES * LANE_ROWS))
    missing = parts * LANES * LANE_ROWS - n
    if missing:  # zeros change no sum
        x = xp.concatenate((x, xp.zeros((missing, width), x.dtype)))
    lanes = x.reshape(parts, LANE_ROWS, LANES, width).sum(axis=1)
    return ((lanes[:, 0] + lanes[:, 1]) + (lanes[:, 2] + lanes[:, 3])).sum(axis=0)
