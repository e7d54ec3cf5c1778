"""The documents of a corpus: their ids, in memory or in files, their loss mask, and a stream of documents.

Attention crosses the border of two documents only with --packing none. A document without `counted` is text:
every token but the first is a target, and a text that is longer than a window continues in the next window. A
document with `counted` is a conversation: the loss counts only marked tokens, and tokens beyond the end of a
window are dropped, because a reply without its question would be a bad example.

Token files are read at given positions and not memory-mapped. A corpus may be larger than all memory. The
system caches the pages that are read, once for all ranks of a host. It would cache mapped memory too, but a
signal ends the process if a mapped file shrinks or its disk fails. A failed read raises an error.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from io import FileIO
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from zero_mpi.errors import FileError, JobError
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import fill, open_file, reason

Ids = NDArray[np.unsignedinteger[Any]]
Places = NDArray[np.int64]
T = TypeVar("T")

MOST_HELD = 1 << 24  # a rank holds at most this many bytes of ids in memory; more stay in files
OPEN_FILES = 128  # maximum number of files that one process holds open; a corpus may have thousands
SAMPLES, SAMPLE_BYTES = 1024, 1 << 14  # number and bytes of samples in a digest; 16 MiB for up to 512 spans
CHANGED = "files of --data must not change during a run"


@dataclass(frozen=True)
class FileSpan:
    """A run of consecutive ids in a file."""

    path: str
    start: int  # position in the file, in bytes, at which the ids begin
    size: int  # number of ids
    dtype: np.dtype[Any]
    length: int  # size of the file in bytes at the start of the run

    def read(self, first: int, buffer: NDArray[Any]) -> None:
        """Fill `buffer` with the ids from index `first` on; raise JobError if the file has changed."""
        view, at = buffer.view(np.uint8).data, self.start + first * self.dtype.itemsize
        try:
            file = cached_file(self.path, self.length).file
            if fill(file.fileno(), view, at) < len(view):
                raise EOFError(f"it ends at byte {os.fstat(file.fileno()).st_size:,}")
        except (OSError, EOFError) as error:
            place = f"{len(view):,} bytes at byte {at:,} of {shown(self.path)}"
            raise JobError(f"cannot read {place}: {reason(error)}; {CHANGED}") from error


class OpenFile:
    """An open file. It is closed when nothing refers to it any more."""

    def __init__(self, file: FileIO) -> None:
        self.file = file

    def __del__(self) -> None:
        self.file.close()


@lru_cache(maxsize=OPEN_FILES)
def cached_file(path: str, length: int) -> OpenFile:
    """Return an open file from the cache. Raise JobError if it does not have `length` bytes."""
    try:
        file = open_file(path, "a token file")
    except FileError as error:
        raise JobError(f"{error}; {CHANGED}") from None
    size = os.fstat(file.fileno()).st_size
    if size != length:
        file.close()
        raise JobError(
            f"{shown(path)} has {size:,} bytes, but had {length:,} at the start of the run; {CHANGED}"
        )
    return OpenFile(file)


class TokenSpans:
    """Spans of files as one sequence of ids, in their widest dtype. A slice of it is a TokenSpans too.

    Ids are checked when they are read: an id that is not below `vocab` raises JobError.
    """

    ndim = 1

    def __init__(self, spans: Sequence[FileSpan], vocab: int) -> None:
        self.spans, self.vocab = _merge_adjacent(spans), vocab
        widest = max((span.dtype.itemsize for span in self.spans), default=2)
        self.dtype = np.dtype(np.uint16 if widest == 2 else np.uint32)
        self._ends: Places = np.cumsum([span.size for span in self.spans], dtype=np.int64)
        self.size = int(self._ends[-1]) if self.spans else 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory that a rank needs during a run to hold the ids."""
        return self.size * self.dtype.itemsize * (not self.stays_in_files)

    @property
    def stays_in_files(self) -> bool:
        """True if the ids stay in the files during a run because they have more than `MOST_HELD` bytes."""
        return self.size * self.dtype.itemsize > MOST_HELD

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> TokenSpans:
        first, stop, step = part.indices(self.size)
        assert step == 1, "a slice of ids has step 1"
        spans = [
            replace(span, start=span.start + at * span.dtype.itemsize, size=count)
            for span, at, count in self._pieces(first, max(stop - first, 0))
        ]
        return TokenSpans(spans, self.vocab)

    def read(self, starts: Places, sizes: Places) -> Ids:
        """Return ids (sum of sizes,): `sizes[i]` ids from index `starts[i]` on, for each i; both are (n,)."""
        buffer, place = np.empty(int(sizes.sum()), self.dtype), 0
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            for span, at, count in self._pieces(start, size):
                part = buffer[place : place + count]
                place += count
                ids = part if span.dtype == self.dtype else np.empty(count, span.dtype)
                span.read(at, ids)
                self._check(ids, span, at)
                if ids is not part:
                    part[...] = ids
        return buffer

    def read_all(self) -> Ids:
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
        """Yield (span, index of its first id, number of ids) for `size` ids from index `start` on."""
        number = int(np.searchsorted(self._ends, start, "right"))
        while size:
            span = self.spans[number]
            at = start - (int(self._ends[number]) - span.size)
            count = min(size, span.size - at)
            yield span, at, count
            start, size, number = start + count, size - count, number + 1

    def sampled_digest(self) -> bytes:
        """Return the sha256 of the spans' sizes and of ids at positions spread evenly over all spans.

        A difference that lies only between the samples does not change the digest.
        """
        total, count = hashlib.sha256(), max(2, SAMPLES // max(1, len(self.spans)))
        for span in self.spans:
            width = SAMPLE_BYTES // span.dtype.itemsize
            last, ids = max(span.size - width, 0), np.empty(min(width, span.size), span.dtype)
            for first in sorted({last * number // (count - 1) for number in range(count)}):
                span.read(first, ids)
                total.update(f"{span.size} {span.dtype.str} {first} ".encode())
                total.update(ids.data)
                self._check(ids, span, first)
        return total.digest()


def _merge_adjacent(spans: Sequence[FileSpan]) -> tuple[FileSpan, ...]:
    """Return the spans that are not empty; spans of one file that follow each other are merged."""
    merged = list[FileSpan]()
    for span in filter(lambda each: each.size, spans):
        last = merged[-1] if merged else None
        if last and replace(last, start=last.start + last.size * last.dtype.itemsize, size=span.size) == span:
            merged[-1] = replace(last, size=last.size + span.size)
        else:
            merged.append(span)
    return tuple(merged)


def up_to(counts: Places) -> Places:
    """Return 0, 1, ... counts[0] - 1, 0, 1, ... counts[1] - 1, and so on."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if ends.size else 0) - np.repeat(ends - counts, counts)


def in_groups(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yield the items in order, as lists. A list ends as soon as the sizes of its items sum to `limit`."""
    group, total = list[T](), 0
    for item in items:
        group.append(item)
        total += size(item)
        if total >= limit:
            yield group
            group, total = [], 0
    if group:
        yield group


def read_ids(ids: NDArray[Any] | TokenSpans, starts: Places, sizes: Places) -> NDArray[Any]:
    """Return ids (sum of sizes,), from memory or files: for each i, `sizes[i]` ids from `starts[i]` on."""
    if isinstance(ids, TokenSpans):
        return ids.read(starts, sizes)
    selected: NDArray[Any] = ids[np.repeat(starts, sizes) + up_to(sizes)]
    return selected


Tokens = NDArray[np.integer[Any]] | TokenSpans
Counted = NDArray[np.bool_]


class Remark(str):
    """Note for the user that only informs, in contrast to a warning."""


class Document(NamedTuple):
    """Ids of a document in order, with the document's name and digest."""

    name: str  # name of the file or line, used in messages and in the digest of the corpus
    tokens: Tokens  # (n,) uint16 or uint32, in memory or in a file; text ends with a separator
    digest: bytes  # digest of the content: of text and its loss mask, or of a file
    counted: Counted | None = None  # (n,) whether the loss counts a token (never the first); None: all count
    # (D,) where each document in a token file ends; none is empty. None: a single document, or unknown ends.
    # For a pair, which has `counted`, the ends of its two sides.
    ends: NDArray[np.int64] | None = None
    at: int = 0  # index of the first token among all tokens of the source

    @property
    def is_divisible(self) -> bool:
        """True if this contains several documents of text, of which some may be held out."""
        return self.ends is not None and len(self.ends) > 1 and self.counted is None

    def cut(self, place: int) -> tuple[Document, Document]:
        """Split a document at an index and return the two parts. If the ends of the documents inside it are
        known, the document is split at the next end instead, or at the last one before its own end.
        """
        ends, count = self.ends, self.counted
        if ends is not None and len(ends) > 1:
            borders = ends[:-1]
            place = int(borders[min(int(np.searchsorted(borders, place)), len(borders) - 1)])
        first = self._replace(tokens=self.tokens[:place], counted=None if count is None else count[:place])
        last = self._replace(tokens=self.tokens[place:], counted=None if count is None else count[place:])
        last = last._replace(at=self.at + place)
        if ends is None:
            return first, last
        first_ends = np.append(ends[ends < place], place)
        return first._replace(ends=first_ends), last._replace(ends=ends[ends > place] - place)


@dataclass(frozen=True, eq=False)
class Stream:
    """Several documents joined to one sequence of ids."""

    ids: Tokens  # (n,) ids of all documents, uint16 or uint32, in memory or in files
    ends: NDArray[np.int64]  # (D,) where each document ends
    counted: Counted | None = None  # (n,) whether the loss counts each token; None for text: it counts all
    runs: NDArray[np.int64] | None = None  # (2 R,) start of each of R runs, in the stream and in the data

    def in_data(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices of tokens in the full data, held-out tokens included; -1 stays -1."""
        assert self.runs is not None, "positions in the data need a stream made by stream_of"
        starts, origins = self.runs.reshape(-1, 2).T
        run = np.searchsorted(starts, np.maximum(places, 0), "right") - 1
        return np.where(places < 0, -1, places - starts[run] + origins[run])

    @property
    def size(self) -> int:
        return int(self.ids.size)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self.ids, self.ends, self.counted) if array is not None)


def stream_of(documents: Sequence[Document]) -> Stream:
    """Return the documents as one stream. All or none have `counted`; all or none have their ids in files."""
    sizes = np.array([document.tokens.size for document in documents], np.int64)
    stops = np.cumsum(sizes)
    doc_ends = [
        [stop] if each.ends is None else stop - each.tokens.size + each.ends
        for stop, each in zip(stops.tolist(), documents, strict=True)
    ]
    ends = np.concatenate([np.zeros(0, np.int64), *doc_ends])
    # Documents adjacent in the data form a run. It begins at `starts` in the stream, `origins` in the data.
    starts, origins = stops - sizes, np.array([document.at for document in documents], np.int64)
    first = np.flatnonzero(np.diff(origins - starts, prepend=-1))
    runs = np.stack([starts[first], origins[first]], axis=1).ravel()
    if len(documents) == 1:
        return Stream(documents[0].tokens, ends, documents[0].counted, runs)
    masks = [document.counted for document in documents if document.counted is not None]
    assert len(masks) in (0, len(documents)), "text and conversations cannot be mixed"
    counted = np.concatenate(masks) if masks else None
    in_files = [each.tokens for each in documents if isinstance(each.tokens, TokenSpans)]
    if in_files:
        assert len(in_files) == len(documents), "all ids are in memory, or all are in files"
        spans = [span for tokens in in_files for span in tokens.spans]
        return Stream(TokenSpans(spans, in_files[0].vocab), ends, counted, runs)
    arrays = [each.tokens for each in documents if isinstance(each.tokens, np.ndarray)]
    return Stream(np.concatenate(arrays or [np.empty(0, np.uint16)]), ends, counted, runs)
