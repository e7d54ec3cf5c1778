"""Token ids in files: their places, and reads by position.

Nothing is memory-mapped. A corpus may be larger than all memory; the system keeps the pages that
ranks of a host read, once for all of them. A map would read as well, but if a file shrinks or its disk
fails, a map ends the process by a signal without any message; a failed read can report the error.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import FileIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zero_mpi.errors import FileError, JobError
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import fill, open_file

Ids = NDArray[np.unsignedinteger[Any]]
Places = NDArray[np.int64]

MOST_HELD = 1 << 24  # bytes of ids that each rank holds in memory, to be independent of a file
OPEN_FILES = 128  # open files of one process; a corpus may have thousands
SAMPLES, SAMPLE_BYTES = 1024, 1 << 14  # places and bytes of a sampled digest: 16 MiB of a corpus of any size
CHANGED = "files of --data must not change during a run"


@dataclass(frozen=True)
class FileSpan:
    """Consecutive ids of one file."""

    path: str
    start: int  # byte of the file where they begin
    size: int  # number of ids
    dtype: np.dtype[Any]
    length: int  # bytes of the full file, when it was first checked

    def part(self, first: int, stop: int) -> FileSpan:
        start = self.start + first * self.dtype.itemsize
        return FileSpan(self.path, start, stop - first, self.dtype, self.length)

    def read(self, first: int, room: NDArray[Any]) -> None:
        """Fill `room` with ids from `first` on; raises JobError if the file has changed."""
        view, at = room.view(np.uint8).data, self.start + first * self.dtype.itemsize
        try:
            file = opened(self.path, self.length).file
            if fill(file.fileno(), view, at) < len(view):
                raise EOFError(f"it ends at byte {os.fstat(file.fileno()).st_size:,}")
        except (OSError, EOFError) as error:
            reason = getattr(error, "strerror", None) or error
            raise JobError(
                f"cannot read {len(view):,} bytes at byte {at:,} of {shown(self.path)}: {reason}; {CHANGED}"
            ) from error


class OpenFile:
    """File that is closed when its last user is gone."""

    def __init__(self, file: FileIO) -> None:
        self.file = file

    def __del__(self) -> None:
        self.file.close()


@lru_cache(maxsize=OPEN_FILES)
def opened(path: str, length: int) -> OpenFile:
    """Return a file of `length` bytes, open until many others are; raises JobError if its length differs."""
    try:
        file = open_file(path, "a token file")
    except FileError as error:
        raise JobError(f"{error}; {CHANGED}") from None
    found = os.fstat(file.fileno()).st_size
    if found != length:
        file.close()
        raise JobError(
            f"{shown(path)} has {found:,} bytes, but had {length:,} when the run started; {CHANGED}"
        )
    return OpenFile(file)


class TokenSpans:
    """Spans of files as one row of ids, uint16 or uint32 by the widest of them. A slice is another one.

    Ids are checked when they are read: one outside the vocabulary of `vocab` is a JobError.
    """

    ndim = 1

    def __init__(self, spans: Sequence[FileSpan], vocab: int) -> None:
        self.spans = joined(spans)
        self.vocab = vocab
        widest = max((span.dtype.itemsize for span in self.spans), default=2)
        self.dtype = np.dtype(np.uint16 if widest == 2 else np.uint32)
        self._ends: Places = np.cumsum([span.size for span in self.spans], dtype=np.int64)

    @property
    def size(self) -> int:
        return int(self._ends[-1]) if self.spans else 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the ids take during a run."""
        return self.size * self.dtype.itemsize * (not self.stays)

    @property
    def stays(self) -> bool:
        """Tell whether the ids are so many that they stay in the files."""
        return self.size * self.dtype.itemsize > MOST_HELD

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> TokenSpans:
        first, stop, step = part.indices(self.size)
        assert step == 1, "ids are one behind the other"
        pieces = self._pieces(first, max(stop - first, 0))
        return TokenSpans([span.part(at, at + count) for span, at, count in pieces], self.vocab)

    def read(self, starts: Places, sizes: Places) -> Ids:
        """Return the ids (sum of sizes,) of `sizes` (n,) places each from `starts` (n,) on."""
        room, done = np.empty(int(sizes.sum()), self.dtype), 0
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            for span, at, count in self._pieces(start, size):
                here = room[done : done + count]
                done += count
                given = here if span.dtype == self.dtype else np.empty(count, span.dtype)
                span.read(at, given)
                self._check(given, span, at)
                if given is not here:
                    here[...] = given
        return room

    def held(self) -> Ids:
        """Return all ids, read into memory."""
        return self.read(np.array([0]), np.array([self.size]))

    def _check(self, ids: NDArray[np.integer[Any]], span: FileSpan, first: int) -> None:
        if ids.size and (ids.max() >= self.vocab or ids.min() < 0):
            place = int(np.argmax((ids < 0) | (ids >= self.vocab)))
            byte = span.start + (first + place) * span.dtype.itemsize
            raise JobError(
                f"{shown(span.path)}: id {ids[place]} at byte {byte:,} is outside the vocabulary of "
                f"{self.vocab}: use a larger --vocab-size or other token files"
            )

    def _pieces(self, start: int, size: int) -> Iterator[tuple[FileSpan, int, int]]:
        """Yield (span, first id in it, number of ids) of the spans that hold `size` ids from `start` on."""
        number = int(np.searchsorted(self._ends, start, "right"))
        while size:
            span = self.spans[number]
            at = start - (int(self._ends[number]) - span.size)
            count = min(size, span.size - at)
            yield span, at, count
            start, size, number = start + count, size - count, number + 1

    def samples(self) -> Iterator[tuple[Ids, FileSpan, int]]:
        """Yield ids at places spread evenly over all spans, each with its span and place there."""
        for span in self.spans:
            width = SAMPLE_BYTES // span.dtype.itemsize
            count = max(2, SAMPLES // len(self.spans))
            last = max(span.size - width, 0)
            for first in sorted({last * number // (count - 1) for number in range(count)}):
                room = np.empty(min(width, span.size), span.dtype)
                span.read(first, room)
                yield room, span, first

    def sampled_digest(self) -> bytes:
        """Return the sha256 of sizes, and of sampled ids: tells one corpus from another in little time."""
        total = hashlib.sha256()
        for ids, span, first in self.samples():
            total.update(f"{span.size} {span.dtype.str} {first} ".encode())
            total.update(ids.data)
            self._check(ids, span, first)
        return total.digest()


def joined(spans: Sequence[FileSpan]) -> tuple[FileSpan, ...]:
    """Return the spans that hold ids; spans that lie next to each other in a file are merged."""
    found = list[FileSpan]()
    for span in spans:
        last = found[-1] if found else None
        if last is not None and (last.path, last.start + last.size * last.dtype.itemsize, last.dtype) == (
            span.path,
            span.start,
            span.dtype,
        ):
            found[-1] = FileSpan(last.path, last.start, last.size + span.size, last.dtype, last.length)
        elif span.size:
            found.append(span)
    return tuple(found)


def up_to(counts: Places) -> Places:
    """Return 0, 1, ... counts[0] - 1, 0, 1, ... counts[1] - 1, and so on."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if ends.size else 0) - np.repeat(ends - counts, counts)


def read_ids(ids: NDArray[Any] | TokenSpans, starts: Places, sizes: Places) -> NDArray[Any]:
    """Return the ids (sum of sizes,) of `sizes` (n,) places each from `starts` (n,) on, held or in files."""
    if isinstance(ids, TokenSpans):
        return ids.read(starts, sizes)
    found: NDArray[Any] = ids[np.repeat(starts, sizes) + up_to(sizes)]
    return found
