"""Elements in another order, read in ranges or in pieces: never more in memory than asked for, plus a piece.

Two reorderings, each both ways. Rotary halves: within a head of D rows, Hugging Face's row s * D/2 + j is
GGUF's row 2 j + s. Transposition: a matrix (in, out) of gpt2 is (out, in) in GGUF. To GGUF any range of
elements can be asked for, since ranks read slices; back only whole tensors, as a stream of pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from zero_mpi.checkpoint.tensor_file import CHUNK

Floats = npt.NDArray[np.float32]
Read = Callable[[int, int], Floats]
"""Elements [start, stop) of a stored, flattened tensor."""
ReadBlock = Callable[[int, int, int, int], Floats]
"""Rows [a, b) and columns [c, d) of a stored matrix, (b - a, d - c)."""


def rows_of(start: int, stop: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """The range [start, stop) of rows of `width` elements as (first row, last, first column, last): at most
    a part of a row, whole rows, and a part of a row."""
    while start < stop:
        row, column = divmod(start, width)
        whole = (stop - start) // width if column == 0 else 0
        if whole:
            yield row, row + whole, 0, width
        else:
            yield row, row + 1, column, min(width, column + stop - start)
        start += whole * width or min(width - column, stop - start)


def interleaved(read: Read, head: int, width: int, start: int, out: Floats) -> None:
    """Fill `out` with the elements from `start` on of a tensor with rows in GGUF's rotary order.

    `read` gives the tensor with halves; a head has `head` rows of `width` elements.
    """
    at = 0
    for a, b, c, d in rows_of(start, start + out.size, width):
        block = out[at : at + (b - a) * (d - c)].reshape(b - a, d - c)
        for first in range(a - a % head, b, head):
            for half in (0, 1):  # within a head, GGUF's rows of even place lie together, and those of odd
                row, end = max(a, first), min(b, first + head)
                row += (row + half) % 2
                _read_rows(read, _stored_row(row, head) * width + c, block[row - a : end - a : 2], width)
        at += block.size


def _stored_row(row: int, head: int) -> int:
    place = row % head
    return row - place + place % 2 * (head // 2) + place // 2


def _read_rows(read: Read, start: int, target: Floats, width: int) -> None:
    """Fill the rows of `target` with what lies together from `start` on, in pieces."""
    step = max(1, CHUNK // width)
    for at in range(0, len(target), step):
        part = target[at : at + step]
        part[:] = read(start + at * width, start + at * width + part.size).reshape(part.shape)


def transposed(read: ReadBlock, height: int, width: int, start: int, out: Floats) -> None:
    """Fill `out` with the elements from `start` on of the transpose of a stored matrix (width, height).

    Where a range needs a good part of each stored row, bands of whole rows are read, since they lie together.
    """
    at = 0
    for a, b, c, d in rows_of(start, start + out.size, width):
        block = out[at : at + (b - a) * (d - c)].reshape(b - a, d - c)
        left, right = (0, height) if 4 * (b - a) >= height else (a, b)
        step = max(1, CHUNK // (right - left))
        for i in range(c, d, step):
            band = read(i, min(d, i + step), left, right)[:, a - left : b - left]
            block[:, i - c : i - c + len(band)] = band.T
        at += block.size


def halves_of(read: Read, head: int, width: int, heads: int) -> Iterator[Floats]:
    """A tensor with rows in GGUF's rotary order, with halves instead: head by head, flat."""
    for number in range(heads):
        rows = read(number * head * width, (number + 1) * head * width).reshape(head // 2, 2, width)
        yield np.ascontiguousarray(rows.swapaxes(0, 1)).reshape(-1)


def transposes_of(read: Read, height: int, width: int) -> Iterator[Floats]:
    """The transpose of a matrix (height, width), in bands of its rows, flat."""
    step, rows = max(1, CHUNK // height), max(1, CHUNK // width)
    for c in range(0, width, step):
        band = np.empty((min(step, width - c), height), np.float32)
        for a in range(0, height, rows):
            b = min(height, a + rows)
            band[:, a:b] = read(a * width, b * width).reshape(b - a, width)[:, c : c + step].T
        yield band.reshape(-1)
