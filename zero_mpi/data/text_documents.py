"""Texts as documents: encoded, and closed by eos (a bos if the tokenizer has no eos).

The one place that decides which ids a text becomes, for a run that reads text and for a folder of token
files that is made of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from zero_mpi.data.control_tokens import PARSE, TextReader
from zero_mpi.data.documents import Document
from zero_mpi.data.tokenizers.byte import Tokenizer

Text = tuple[str, bytes]
"""The name of a text, and its bytes."""

_ENCODED = 1 << 23  # bytes of documents encoded together: enough for all threads, little beside the ids


def text_documents(texts: Iterable[Text], reader: TextReader) -> Iterator[Document]:
    """Each text encoded and closed, in their order; a few MiB of them are held at a time."""
    for group in _groups(texts):
        yield from _encoded(group, reader)


def separator(tokenizer: Tokenizer) -> int | None:
    """What closes a document. A bos in the place of a missing eos still says where the next one begins."""
    return tokenizer.bos if tokenizer.eos is None else tokenizer.eos


def separator_notes(tokenizer: Tokenizer) -> Iterator[str]:
    """A line where nothing closes a document."""
    if separator(tokenizer) is None:
        yield "the tokenizer has neither eos nor bos: nothing stands between documents"


def _groups(texts: Iterable[Text]) -> Iterator[list[Text]]:
    """Texts in their order, in groups of about `_ENCODED` bytes."""
    group, size = list[Text](), 0
    for name, data in texts:
        group.append((name, data))
        size += len(data)
        if size >= _ENCODED:
            yield group
            group, size = [], 0
    yield group


def _encoded(texts: Sequence[Text], reader: TextReader) -> Iterator[Document]:
    """An empty file stays empty: an eos alone teaches nothing. No bos comes first: the eos before will do."""
    last, mark = separator(reader.tokenizer), PARSE.encode() if reader.parses else b""
    for (name, data), ids in zip(texts, reader.encode([data for _, data in texts]), strict=True):
        if ids.size and last is not None:
            closed = np.empty(ids.size + 1, ids.dtype)
            closed[:-1], closed[-1] = ids, last
            ids = closed
        yield Document(name, ids, hashlib.sha256(data).digest() + mark)
