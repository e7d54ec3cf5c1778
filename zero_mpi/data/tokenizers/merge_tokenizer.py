"""SentencePiece's merges by score: neighbours become one token, the pair with the greatest score first."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zero_mpi.data.tokenizers.gguf_tokenizer import STANDING
from zero_mpi.data.tokenizers.pair_table import FREE, MOST, PairTable, pair_table
from zero_mpi.data.tokenizers.sentencepiece import SPACE, Letters, SentencePieceTokenizer
from zero_mpi.errors import UsageError
from zero_mpi.files.gguf_keys import THE_FILE, GGUFKeys

_NAME = "general.name"
_LETTERS = 0x110000


class _Symbols(NamedTuple):
    """Data of the merges: tokens, letters that are part of a token, and the next number for all others."""

    of_letter: NDArray[np.int32]  # (letters of Unicode + 1,); the last is for no letter
    pairs: PairTable  # from two symbols to the symbol that they become
    ranks: NDArray[np.int64]  # (symbols,) by the score of each: the greatest score has rank 0
    bytewise: NDArray[np.int32]  # (256,) the token of a byte


class MergeTokenizer(SentencePieceTokenizer):
    """Tokenizer of GGUF keys whose `tokenizer.ggml.model` is "llama": byte-pair encoding with scores.

    A letter without a token is written by the tokens of its bytes, "<0x00>" and so on.
    """

    usual_ids: ClassVar = {"bos": 1, "eos": 2, "unknown": 0}
    usually_adds_space: ClassVar = True

    def __init__(self, metadata: Mapping[str, object], place: str = THE_FILE) -> None:
        super().__init__(metadata, place)
        name = GGUFKeys(metadata, place).text(_NAME) or ""
        # llama.cpp recognises this family only by its name, so the name is part of the tokenizer.
        if any(family in name.lower() for family in ("phi-3", "phi3")):
            self._metadata[_NAME] = name

    def adds_bos(self) -> bool:
        return True

    def stripping(self) -> frozenset[str]:
        if _NAME not in self._metadata:
            return frozenset()
        standing = {t for t, kind in zip(self.tokens, self.types, strict=True) if kind in STANDING}
        return frozenset(standing - {"<unk>", "<s>", "<|endoftext|>"})

    def prepared(self, text: str) -> str:
        return (" " + text if self.adds_space else text).replace(" ", SPACE)

    def segment(self, letters: Letters) -> NDArray[np.int32]:
        from zero_mpi.data.tokenizers import segmentation  # compiled at first use

        table = self._symbols
        symbols = table.of_letter[np.maximum(letters, 0)]
        symbols[letters < 0] = table.of_letter[-1]  # not in any pair
        space = int(table.of_letter[ord(SPACE)]) if self.is_cut_at_words else FREE
        after = segmentation.merge(symbols, *table.pairs, table.ranks, space)
        ids: NDArray[np.int32] = segmentation.spell(symbols, after, letters, table.bytewise, self.vocab_size)
        return ids

    @cached_property
    def _symbols(self) -> _Symbols:
        """Data of the merges, made at first use: this takes a second for a large vocabulary."""
        symbols = dict(self.ids)
        for token in self.tokens:
            for letter in token:
                symbols.setdefault(letter, len(symbols))
        if len(symbols) >= MOST:
            raise UsageError(f"expected a vocabulary of less than {MOST} tokens and letters, found more")
        of_letter = np.full(_LETTERS + 1, len(symbols), np.int32)
        for symbol, number in symbols.items():
            if len(symbol) == 1:
                of_letter[ord(symbol)] = number
        found = [
            (symbols[token[:place]], symbols[token[place:]], number)
            for token, number in self.ids.items()
            for place in range(1, len(token))
            if token[:place] in symbols and token[place:] in symbols
        ]
        left, right, joined = np.array(found, np.int64).reshape(-1, 3).T
        ranks = np.unique(-self.scores, return_inverse=True)[1].astype(np.int64)
        return _Symbols(of_letter, pair_table(left, right, joined), ranks, self._bytewise())

    def _bytewise(self) -> NDArray[np.int32]:
        """Return the token of each byte: "<0xNN>", the letter itself, or the unknown one; else none."""
        nothing = self.vocab_size if self.unknown is None else self.unknown
        names = [(f"<0x{byte:02X}>", chr(byte) if byte < 0x80 else "") for byte in range(256)]
        found = [next((self.ids[name] for name in both if name in self.ids), nothing) for both in names]
        return np.array(found, np.int32)
