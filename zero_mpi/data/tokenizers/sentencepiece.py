"""SentencePiece's tokenizers as model files describe them: merges by score, and the most likely tokens.

A GGUF holds the tokens with their types and scores. The ids are those of llama.cpp, whose rules differ from
those of SentencePiece itself: a space is put before each text that follows a token which stood in the text,
and sums are in float64. The loops are in `segmentation`. If no token crosses the beginning of a word,
long texts are cut there and processed by all threads.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from zero_mpi import environment
from zero_mpi.data.tokenizers.gguf_tokenizer import (
    BYTE,
    KEY,
    NORMAL,
    PIECE,
    USER_DEFINED,
    GGUFTokenizer,
    Lengths,
    Parts,
)
from zero_mpi.data.tokenizers.pair_table import FREE
from zero_mpi.files.gguf_keys import THE_FILE

SPACE = "▁"  # U+2581, stands for a space
SCORES = KEY + "scores"
_BATCH = 64  # pieces that all threads take together
_SEAM = re.compile(f"[^{SPACE}](?={SPACE})")
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")

Letters = NDArray[np.int32]


class SentencePieceTokenizer(GGUFTokenizer):
    """Base of both kinds. Raises UsageError for keys that do not fit together."""

    longest = 512  # SentencePiece trains no longer tokens
    usually_adds_space: ClassVar[bool] = False  # default, if the file does not say

    def __init__(self, metadata: Mapping[str, object], place: str = THE_FILE) -> None:
        super().__init__(metadata, place)
        asked = self._keys.flag(KEY + "add_space_prefix")
        self.adds_space = self.usually_adds_space if asked is None else asked
        given = self._keys.numbers(SCORES, self.vocab_size)
        self.scores = np.zeros(self.vocab_size, np.float32) if given is None else given
        self.unknown = self.special_id("unknown")

    def spelling(self, token: str, kind: int) -> bytes:
        """Return the bytes of a token in a text, by its type; empty for a token that is not text."""
        if kind == NORMAL:
            return token.replace(SPACE, " ").encode()
        if kind == BYTE:
            found = _BYTE.fullmatch(token)
            return bytes([int(found[1], 16)]) if found else b""
        return token.encode() if kind == USER_DEFINED else b""

    def ids_of_parts(self, documents: Sequence[Parts]) -> list[NDArray[np.integer[Any]]]:
        """Return the ids of each document; all are processed as one text, pieces of which go to threads."""
        end = self.vocab_size  # put after each document
        pieces = self._pieces(self._letters([part for parts in documents for part in (*parts, end)]))
        batches = (pieces[first : first + _BATCH] for first in range(0, len(pieces), _BATCH))
        ids = np.concatenate([row for batch in batches for row in self.run_batch(batch, self._segmented)])
        stops = np.flatnonzero(ids == end).tolist()
        return [ids[start + 1 : stop] for start, stop in pairwise([-1, *stops])]

    def _segmented(self, pieces: Sequence[Letters]) -> list[NDArray[np.integer[Any]]]:
        threads = min(environment.within_quota(environment.cores()), len(pieces))
        if threads == 1:
            return [self.segment(piece) for piece in pieces]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(self.segment, pieces))

    def lengths(self, text: str, ids: NDArray[np.integer[Any]]) -> Lengths:
        """Return the number of bytes (n,) of a text between tokens that each of its ids stands for.

        The space that was put before it counts 0; a sign for a space in the text itself counts 3.
        """
        lengths = super().lengths(text, ids)
        lengths[:1] -= int(self.adds_space)
        if SPACE not in text:
            return lengths
        given, read = (np.array([len(c.encode()) for c in t]) for t in (text, text.replace(SPACE, " ")))
        ends = np.interp(np.cumsum(lengths), np.cumsum([0, *read]), np.cumsum([0, *given]))
        spread: Lengths = np.diff(ends.astype(np.int64), prepend=0)
        return spread

    @abstractmethod
    def prepared(self, text: str) -> str:
        """Return a text between tokens as it is segmented: spelt and spaced as the kind requires."""

    @abstractmethod
    def segment(self, letters: Letters) -> NDArray[np.int32]:
        """Return the ids (m,) of letters (n,)."""

    def _letters(self, parts: Parts) -> Letters:
        """Return the code points (n,) of parts; a token that stood in the text is -1 - its id."""
        texts = ["\0" if isinstance(part, int) else self.prepared(part) for part in parts]
        letters = np.frombuffer("".join(texts).encode("utf-32-le"), np.int32).copy()
        ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))
        stood = np.array([part if isinstance(part, int) else FREE for part in parts], np.int32)
        letters[ends[stood != FREE] - 1] = -1 - stood[stood != FREE]
        return letters

    def _pieces(self, letters: Letters) -> list[Letters]:
        """Return letters in pieces of about `PIECE` that have the ids of the full text."""
        begins = letters < 0
        if self.is_cut_at_words:
            begins[1:] |= (letters[1:] == ord(SPACE)) & (letters[:-1] != ord(SPACE))
        firsts = np.flatnonzero(begins)
        wanted = np.searchsorted(firsts, np.arange(PIECE, len(letters), PIECE))
        return np.split(letters, np.unique(firsts[wanted[wanted < len(firsts)]]))

    @cached_property
    def is_cut_at_words(self) -> bool:
        """Tell whether no token crosses the beginning of a word."""
        return not any(_SEAM.search(token) for token in self.tokens)
