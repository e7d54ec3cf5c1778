"""Token file of any format: finds where the ids lie, scans them once for a digest, then reads by position.

A format (`token_formats`) reads the header and says where ids and documents are; only ids are read. A file
larger than `WHOLE` is only sampled at first, so that a run on terabytes begins as soon as any
other.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zero_mpi.data.token_spans import FileSpan, TokenSpans
from zero_mpi.errors import UsageError

Ids = NDArray[np.integer[Any]]

WHOLE = 1 << 30  # largest file that is read to its end for its digest, which takes half a second
BLOCK = 1 << 20  # ids processed together


class TokenLayout(NamedTuple):
    """Places of the ids in a file."""

    runs: list[tuple[int, int]]  # (first byte, number of ids) of each run of them, in their order
    dtype: np.dtype[Any]  # of an id, little-endian
    ends: NDArray[np.int64] | None = None  # (D,) where each document ends; None: the file does not tell

    @property
    def size(self) -> int:
        return sum(count for _, count in self.runs)


def look_at(path: Path, file: FileIO, layout: TokenLayout, vocab: int) -> tuple[TokenSpans, bytes]:
    """Return (where the ids lie, a digest). The ids stay in the file; an id beyond the vocabulary is refused.

    The digest is the sha256 of a file of at most `WHOLE` bytes; of a larger one it is
    `TokenSpans.sampled_digest`, and its other ids are checked when they are read. Raises UsageError.
    """
    real, length = os.path.abspath(os.fsdecode(file.name)), os.fstat(file.fileno()).st_size
    spans = TokenSpans([FileSpan(real, start, n, layout.dtype, length) for start, n in layout.runs], vocab)
    if length > WHOLE:
        return spans, spans.sampled_digest()
    return spans, look_through(path, file, layout, vocab)


def look_through(path: Path, file: FileIO, layout: TokenLayout, vocab: int) -> bytes:
    """Return the digest of the file, read in one pass, because mapped pages would count as this process's
    memory.
    """
    total, at, seen = hashlib.sha256(), 0, 0
    file.seek(0)
    for start, count in layout.runs:
        total.update(exactly(file, start - at))
        for ids in blocks(file, count, layout.dtype):
            total.update(ids.data)
            check_ids(path, ids, seen, vocab)
            seen += len(ids)
        at = start + count * layout.dtype.itemsize
    while rest := file.read(BLOCK):
        total.update(rest)
    return total.digest()


def blocks(file: FileIO, count: int, dtype: np.dtype[Any]) -> Iterator[Ids]:
    """Yield the next `count` ids of a file, `BLOCK` at a time, all in the same memory."""
    room = np.empty(min(count, BLOCK), dtype)
    while count:
        ids = room[: min(count, BLOCK)]
        fill(file, ids)
        yield ids
        count -= len(ids)


def check_ids(path: Path, ids: Ids, first: int, vocab: int) -> None:
    """Raise UsageError for an id outside the vocabulary; `first` is the position of ids[0]."""
    strange = (ids < 0) | (ids >= vocab) if ids.dtype.kind == "i" else ids >= vocab
    if strange.any():
        place = int(np.argmax(strange))
        problem = f"id {ids[place]} at position {first + place} is outside the vocabulary of {vocab}"
        raise UsageError(f"{path}: {problem}: use a larger --vocab-size or other token files")


def exactly(file: FileIO, count: int) -> bytes:
    """Return the next `count` bytes; ValueError if there are fewer."""
    data = file.read(count)
    if len(data or b"") != count:
        raise ValueError(f"expected {count} bytes more, found the end of the file")
    return data


def fill(file: FileIO, room: Ids) -> None:
    """Read until `room` is full; the system may deliver parts. ValueError if the file ends before."""
    view, at = room.data.cast("B"), 0
    while at < len(view):
        got = file.readinto(view[at:])
        if not got:
            raise ValueError(f"expected {len(view) - at} bytes more, found the end of the file")
        at += got


def check_length(file: FileIO, expected: int) -> None:
    """Raise ValueError for a file whose length differs from its header's."""
    found = os.fstat(file.fileno()).st_size
    if found != expected:
        raise ValueError(f"expected {expected} bytes, as its header says, found {found}")
