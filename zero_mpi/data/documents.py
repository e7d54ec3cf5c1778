"""What a corpus is made of: documents, encoded, with the tokens that a loss counts.

A document is what attention may look at together. One without `counted` is text: every token but the first is
a target, and where it is longer than a window it goes on in the next. One with `counted` is a conversation:
tokens that are not counted are read and not learned, and what lies behind a window's end is left out, for a
reply without its question teaches something else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.integer[Any]]
Counted = NDArray[np.bool_]


class Document(NamedTuple):
    """Ids in their order, and where they are from.

    name      of the file or line, for people and for the digest of the corpus
    tokens    ids (n,), uint16 or uint32; of text with what closes it
    digest    sha256 of the bytes that it was made of, and of what was made of them
    counted   (n,): whether the loss counts a token as a target, the first never is one; None: all are
    """

    name: str
    tokens: Tokens
    digest: bytes
    counted: Counted | None = None
