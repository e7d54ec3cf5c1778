"""Inputs cut into parts, of which each becomes a token file, by their bytes alone; and who writes which.

Parts are dealt out before the work begins, the heaviest first, each to the rank that has least so far. That
takes no message and leaves ranks apart by less than the last part of one; to hand out parts one by one would
gain something on hosts of unlike speed only.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from zero_mpi.tokenize.text_formats import TEXT_FORMATS, InputFile

FRACTION, LEAST, MOST = 256, 1 << 20, 1 << 28  # of all bytes in a part; bytes


class FilePiece(NamedTuple):
    """What of input number `file` goes into a part: from place `first` to `stop`, and what it weighs."""

    file: int
    first: int
    stop: int
    weight: int


class WorkPart(NamedTuple):
    """What becomes one token file."""

    number: int
    pieces: tuple[FilePiece, ...]

    @property
    def weight(self) -> int:
        """Bytes of text, or nearly so."""
        return sum(piece.weight for piece in self.pieces)


def part_size(total: int) -> int:
    """How much of `total` bytes a part takes where no flag says it."""
    return min(max(total // FRACTION, LEAST), MOST)


def cut_parts(files: Sequence[InputFile], weights: Sequence[Sequence[int]], size: int) -> list[WorkPart]:
    """The parts, of about `size` bytes each, in the order of the inputs.

    A part ends before a piece that would make it larger; a piece that cannot be cut may be larger alone.
    """
    parts, pieces, held = list[WorkPart](), list[FilePiece](), 0
    for piece in _pieces(files, weights, size):
        if pieces and held + piece.weight > size:
            parts.append(WorkPart(len(parts), tuple(pieces)))
            pieces, held = [], 0
        pieces.append(piece)
        held += piece.weight
    return [*parts, WorkPart(len(parts), tuple(pieces))] if pieces else parts


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
    """The places of weights that each rank has, in their order."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for weight, place in sorted(((weight, place) for place, weight in enumerate(weights)), key=_heaviest):
        load, rank = loads[0]
        shares[rank].append(place)
        heapq.heapreplace(loads, (load + weight, rank))
    return [sorted(share) for share in shares]


def _heaviest(each: tuple[int, int]) -> tuple[int, int]:
    return -each[0], each[1]
