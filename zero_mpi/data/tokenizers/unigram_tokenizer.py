"""SentencePiece's unigram model: of all ways to cut a text, the one whose tokens have the greatest score."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zero_mpi.data.tokenizers.gguf_tokenizer import KEY, NORMAL, UNUSED, USER_DEFINED
from zero_mpi.data.tokenizers.pair_table import BITS, FREE, MOST, MOST_SPELT, PairTable, pair_table, trie
from zero_mpi.data.tokenizers.sentencepiece import SPACE, Letters, SentencePieceTokenizer
from zero_mpi.errors import UsageError
from zero_mpi.files.gguf_keys import THE_FILE

CHARSMAP = KEY + "precompiled_charsmap"
_UNKNOWN_BELOW = np.float32(10.0)  # distance of the unknown score below the least score of all tokens


class _Trie(NamedTuple):
    """Tables for finding the most likely tokens: nodes by node and letter, and tokens by node."""

    nodes: PairTable
    ends: NDArray[np.int32]


class UnigramTokenizer(SentencePieceTokenizer):
    """Tokenizer of GGUF keys whose `tokenizer.ggml.model` is "t5": the tokens with the greatest score sum.

    Text is first spelt as the file's charsmap says (mostly NFKC). A letter without a token is unknown.
    """

    usual_ids: ClassVar = {"eos": 1, "unknown": 2, "padding": 0}

    def __init__(self, metadata: Mapping[str, object], place: str = THE_FILE) -> None:
        super().__init__(metadata, place)
        self.removes_spaces = bool(self._keys.flag(KEY + "remove_extra_whitespaces"))
        if self.unknown is None:
            raise UsageError(f"{place} names no unknown token: expected {KEY}unknown_token_id")
        self._unknown = self.unknown
        self._nodes, self._spellings = self._charsmap()

    def adds_bos(self) -> bool:
        return False

    def prepared(self, text: str) -> str:
        """Return a text as the charsmap spells it, spaces replaced, removed and added as the file says."""
        text = self._respelt(text)
        if self.removes_spaces:
            return "".join([SPACE + word for word in text.split(" ") if word])
        bare = text.lstrip(" ")
        before = int(self.adds_space and bare != "")
        return SPACE * (len(text) - len(bare) + before) + bare.replace(" ", SPACE)

    def segment(self, letters: Letters) -> NDArray[np.int32]:
        from zero_mpi.data.tokenizers import segmentation  # compiled at first use

        table = self._trie
        ids: NDArray[np.int32] = segmentation.likeliest(
            letters, *table.nodes, table.ends, self._wide_scores, (self._unknown, self._unknown_score)
        )
        return ids

    @cached_property
    def is_cut_at_words(self) -> bool:
        """Tell whether words can be cut: a space without a token would join unknown letters before it."""
        return SPACE in self.ids and super().is_cut_at_words

    @cached_property
    def _trie(self) -> _Trie:
        kinds = zip(self.ids.items(), self.given_types, strict=True)
        nodes, ends = trie(dict(pair for pair, kind in kinds if kind in (NORMAL, USER_DEFINED, UNUSED)))
        found = np.full(len(nodes) + 1, FREE, np.int32)
        found[list(ends)] = list(ends.values())
        pairs, node = np.fromiter(nodes, np.int64), np.fromiter(nodes.values(), np.int64)
        return _Trie(pair_table(pairs >> BITS, pairs & (MOST - 1), node), found)

    @cached_property
    def _wide_scores(self) -> NDArray[np.float64]:
        """Scores (V,), 0 for tokens that the user defined: likelier than all others."""
        return np.where(np.array(self.given_types) == USER_DEFINED, 0.0, self.scores.astype(np.float64))

    @cached_property
    def _unknown_score(self) -> float:
        normal = self.scores[np.array(self.given_types) == NORMAL]
        return float((normal.min() if normal.size else np.float32(0)) - _UNKNOWN_BELOW)

    def _charsmap(self) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Return the nodes and the spellings of the charsmap, both empty without one."""
        given = self._keys.octets(CHARSMAP)
        if not given:
            return np.zeros(0, np.int64), np.zeros(0, np.uint8)
        size = int.from_bytes(given[:4], "little")
        if len(given) < 4 or size % 4 or not 0 < size < len(given) - 4:
            raise self._keys.fault(CHARSMAP, "the size of a table, the table and spellings")
        nodes = np.frombuffer(given, "<u4", size // 4, 4).astype(np.int64)
        spellings = np.frombuffer(given, np.uint8, offset=4 + size)
        longest = np.diff(np.flatnonzero(spellings == 0), prepend=-1).max(initial=0) - 1
        if longest > MOST_SPELT:
            raise self._keys.fault(CHARSMAP, f"spellings of at most {MOST_SPELT} bytes, not {longest:,}")
        return nodes, spellings

    def _respelt(self, text: str) -> str:
        """Return the text as the charsmap spells it."""
        from zero_mpi.data.tokenizers import segmentation  # compiled at first use

        if not len(self._nodes):
            return text
        given = np.frombuffer(text.encode(), np.uint8)
        out = np.empty(len(given) + len(given) // 8 + 64, np.uint8)
        most = 16 * len(given) + MOST_SPELT  # NFKC makes a text at most 11 times as long
        while len(out) < (length := segmentation.respell(given, self._nodes, self._spellings, out)) <= most:
            out = np.empty(length, np.uint8)
        if length == FREE or length > most:
            expected = "a table that points nowhere but into itself and the spellings"
            raise self._keys.fault(CHARSMAP, f"{expected}, and makes a text 16 times as long at most")
        return out[:length].tobytes().decode(errors="replace")
