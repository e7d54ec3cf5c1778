"""Parts of a corpus: encoded documents, with the tokens that a loss counts, and their stream.

A document is the unit within which attention may look. One without `counted` is text: every token but the
first is a target, and if it is longer than a window it continues in the next. One with `counted` is a
conversation: tokens that are not counted are read but not learned, and tokens beyond a window's end are left
out, because a reply without its question teaches something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zero_mpi.data.token_spans import TokenSpans

Tokens = NDArray[np.integer[Any]] | TokenSpans
Counted = NDArray[np.bool_]


class Remark(str):
    """A note on documents that warns of nothing."""


class Document(NamedTuple):
    """Ids in their order, and their origin."""

    name: str  # of the file or line, for messages and for the digest of the corpus
    tokens: Tokens  # (n,) uint16 or uint32, held or in a file; those of text include the separator
    digest: bytes  # sha256 of the bytes that it was made of, and of the result
    counted: Counted | None = None  # (n,) whether the loss counts a token, never the first; None: all
    # (D,) where the documents of a token file end, none of which is empty; None: it is one, or does not tell.
    # Of a pair, which has `counted`: where both sides end.
    ends: NDArray[np.int64] | None = None

    @property
    def is_divisible(self) -> bool:
        """Return whether some of its documents may be held out without the others."""
        return self.ends is not None and len(self.ends) > 1 and self.counted is None

    def cut(self, place: int) -> tuple[Document, Document]:
        """Return the documents before a place and those from it on. One that crosses it is cut at the place,
        unless its documents' ends are known: then the cut is where one of them ends.
        """
        ends, count = self.ends, self.counted
        if ends is not None and len(ends) > 1:
            borders = ends[:-1]
            place = int(borders[min(int(np.searchsorted(borders, place)), len(borders) - 1)])
        first = self._replace(tokens=self.tokens[:place], counted=None if count is None else count[:place])
        last = self._replace(tokens=self.tokens[place:], counted=None if count is None else count[place:])
        if ends is None:
            return first, last
        before = np.append(ends[ends < place], place)
        return first._replace(ends=before), last._replace(ends=ends[ends > place] - place)


@dataclass(frozen=True, eq=False)
class Stream:
    """Documents one after the other."""

    ids: Tokens  # of all documents (n,), uint16 or uint32, held or in files
    ends: NDArray[np.int64]  # (D,) where each document ends
    counted: Counted | None = None  # (n,) whether the loss counts a token as a target; None: text, all count

    @property
    def size(self) -> int:
        return int(self.ids.size)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self.ids, self.ends, self.counted) if array is not None)


def stream_of(documents: Sequence[Document]) -> Stream:
    """Return the stream of documents, all with `counted` or none, and all held or all in files."""
    ends = ends_of(documents)
    masks = [document.counted for document in documents if document.counted is not None]
    assert len(masks) in (0, len(documents)), "text and conversations do not mix"
    if len(documents) == 1:
        return Stream(documents[0].tokens, ends, documents[0].counted)
    counted = np.concatenate(masks) if masks else None
    in_files = [each.tokens for each in documents if isinstance(each.tokens, TokenSpans)]
    if in_files:
        assert len(in_files) == len(documents), "ids are held, or in files"
        spans = [span for tokens in in_files for span in tokens.spans]
        return Stream(TokenSpans(spans, in_files[0].vocab), ends, counted)
    held = [each.tokens for each in documents if isinstance(each.tokens, np.ndarray)]
    return Stream(np.concatenate(held or [np.empty(0, np.uint16)]), ends, counted)


def ends_of(documents: Sequence[Document]) -> NDArray[np.int64]:
    """Return where each document ends (D,) in the stream of all."""
    ends = np.cumsum([document.tokens.size for document in documents], dtype=np.int64)
    if all(document.ends is None for document in documents):
        return ends
    own = [
        end - each.tokens.size + each.ends if each.ends is not None else [end]
        for end, each in zip(ends.tolist(), documents, strict=True)
    ]
    return np.concatenate(own)
