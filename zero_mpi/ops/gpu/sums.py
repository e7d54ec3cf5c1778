"""Sums over rows on a GPU, for the gradients of vectors; no two threads add to the same number.

A sum has two stages: blocks write lines of partial sums, and a second kernel adds the lines in order to a
gradient of any type. The number of rows alone sets the number of lines, so every GPU adds in the same order.
"""

from zero_mpi.device.types import Array
from zero_mpi.ops import reference
from zero_mpi.ops.gpu.launch import ARRAY, F32, PACK, THREADS, Family, at, by_rows, take, writable
from zero_mpi.ops.registry import implements
from zero_mpi.ops.sizes import column_lines

COLUMN_SUMS = Family("sums.cu", "column_sums", "PPLLLL")
ADD_PARTIALS = Family("sums.cu", "add_partials", "PPPPLL")
COLUMNS = 32  # threads across the columns in the kernels of sums.cu


@implements(reference.linear_backward_b, ARRAY)
def add_columns(x: Array, sums: Array) -> None:
    """Add to sums (O,), of any type, the sum of x (N, O) over rows, whose stride may exceed O."""
    kernel, (x, rows, width, step) = COLUMN_SUMS[x.dtype], by_rows(x)
    if not rows:
        return
    parts = column_lines(rows)
    partial = take((parts, width), F32)
    tiles = -(-width // (COLUMNS * (PACK // x.itemsize)))
    kernel(tiles * parts, THREADS, (x, partial, rows, width, step, parts))
    add_partials(sums, partial)


def add_partials(
    sums: Array, partial: Array, sums2: Array | None = None, partial2: Array | None = None
) -> None:
    """Add to sums (O,), of any of the three types, the lines of partial (parts, O) in their order.

    The same launch adds the lines of `partial2` to a second gradient `sums2`, which has the type of `sums`.
    """
    writable("add_partials", sums, sums2)
    parts, width = partial.shape
    kernel, tiles = ADD_PARTIALS[sums.dtype], -(-width // COLUMNS)
    places = sums, partial, at(sums2), at(partial2)
    kernel(tiles if sums2 is None else 2 * tiles, THREADS, (*places, parts, width))
