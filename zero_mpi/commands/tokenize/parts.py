"""Inputs cut into parts, of which each becomes a token file, by their bytes alone; and who writes which.

Parts are dealt out before the work begins, the heaviest first, each to the rank that has least so far.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from zero_mpi.commands.tokenize.text_formats import TEXT_FORMATS, InputFile

FRACTION, LEAST, MOST = 256, 1 << 20, 1 << 28  # of all bytes in a part; bytes


class FilePiece(NamedTuple):
    """Piece of input number `file`, from place `first` to `stop`. weight: bytes of text, or nearly."""

    file: int
    first: int
    stop: int
    weight: int


class WorkPart(NamedTuple):
    """Part that becomes one token file, with the name of that."""

    name: str
    pieces: tuple[FilePiece, ...]

    @property
    def weight(self) -> int:
        return sum(piece.weight for piece in self.pieces)


def cut_parts(
    files: Sequence[InputFile], weights: Sequence[Sequence[int]], size: int | None
) -> list[WorkPart]:
    """Return the parts, of about `size` bytes each, in the order of the inputs.

    A part ends before a piece that would make it larger; a piece that cannot be cut may be larger alone.
    """
    if size is None:
        size = min(max(sum(map(sum, weights)) // FRACTION, LEAST), MOST)
    parts, held = list[list[FilePiece]](), 0
    for piece in _pieces(files, weights, size):
        if not parts or held + piece.weight > size:
            parts.append([])
            held = 0
        parts[-1].append(piece)
        held += piece.weight
    width = max(5, len(str(len(parts))))
    return [WorkPart(f"{number:0{width}d}", tuple(pieces)) for number, pieces in enumerate(parts)]


def _pieces(files: Sequence[InputFile], weights: Sequence[Sequence[int]], size: int) -> Iterator[FilePiece]:
    for number, (file, found) in enumerate(zip(files, weights, strict=True)):
        if TEXT_FORMATS[file.format].divisible:
            total = sum(found)
            for first in range(0, total, size):
                stop = min(first + size, total)
                yield FilePiece(number, first, stop, stop - first)
        else:
            for place, weight in enumerate(found):
                yield FilePiece(number, place, place + 1, weight)


def dealt(weights: Iterable[int], ranks: int) -> list[list[int]]:
    """Return the places of weights that each rank gets, in their order."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for place, weight in sorted(enumerate(weights), key=lambda each: -each[1]):
        load, rank = loads[0]
        shares[rank].append(place)
        heapq.heapreplace(loads, (load + weight, rank))
    return [sorted(share) for share in shares]
