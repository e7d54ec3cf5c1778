"""SentencePiece tokenizers, set up from model files: merges by score, or the most likely tokens.

A GGUF holds the tokens with their types and scores. The ids are those of llama.cpp, whose rules differ from
SentencePiece's: llama.cpp also puts a space before the text after each token that it cuts out, and it adds
scores in float64. The loops are in `segmentation`, which numba compiles. If no token crosses the beginning of
a word, long texts are cut at such places, and all threads encode the pieces.
"""

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
from zero_mpi.data.tokenizers import gguf_tokenizer as gguf
from zero_mpi.data.tokenizers.byte import Lengths
from zero_mpi.data.tokenizers.pair_table import BITS, FREE, MOST, MOST_SPELT, PairTable, pair_table, trie
from zero_mpi.errors import UsageError
from zero_mpi.files.gguf_keys import THE_FILE, GGUFKeys

SPACE = "▁"  # U+2581, represents a space
SCORES, CHARSMAP, NAME = gguf.KEY + "scores", gguf.KEY + "precompiled_charsmap", "general.name"
_BATCH = 64  # number of pieces that are encoded together by all threads
_SEAM = re.compile(f"[^{SPACE}](?={SPACE})")
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_UNKNOWN_BELOW = np.float32(10.0)  # the score of an unknown letter is this much below the lowest score

Letters = NDArray[np.int32]


class SentencePieceTokenizer(gguf.GGUFTokenizer):
    """Base class of `MergeTokenizer` and `UnigramTokenizer`. Raises UsageError for contradictory keys."""

    longest = 512  # SentencePiece makes no token longer than this
    usually_adds_space = False  # value if the file has no key for it

    def __init__(self, metadata: Mapping[str, object], place: str = THE_FILE) -> None:
        super().__init__(metadata, place)
        flag = self._keys.flag(gguf.KEY + "add_space_prefix")
        self.adds_space = self.usually_adds_space if flag is None else flag
        scores = self._keys.numbers(SCORES, self.vocab_size)
        self.scores = np.zeros(self.vocab_size, np.float32) if scores is None else scores
        self.unknown = self.special_id("unknown")

    @abstractmethod
    def prepare(self, text: str) -> str:
        """Return a text between special tokens with the spelling and the spaces that the class requires."""

    @abstractmethod
    def segment(self, letters: Letters) -> NDArray[np.int32]:
        """Return the ids (m,) of `letters` (n,), which are code points."""

    def spelling(self, token: str, kind: int) -> bytes:
        if kind == gguf.NORMAL:
            return token.replace(SPACE, " ").encode()
        if kind == gguf.BYTE:
            match = _BYTE.fullmatch(token)
            return bytes([int(match[1], 16)]) if match else b""
        return token.encode() if kind == gguf.USER_DEFINED else b""

    def ids_of_parts(self, documents: Sequence[gguf.Parts]) -> list[NDArray[np.integer[Any]]]:
        """Return the ids of each document. The documents form one text, and threads encode pieces of it."""
        end = self.vocab_size  # marks the end of each document
        parts = [part for document in documents for part in (*document, end)]
        texts = ["\0" if isinstance(part, int) else self.prepare(part) for part in parts]
        letters = np.frombuffer("".join(texts).encode("utf-32-le"), np.int32).copy()
        tokens = np.array([part if isinstance(part, int) else FREE for part in parts], np.int32)
        places = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))[tokens != FREE] - 1
        letters[places] = -1 - tokens[tokens != FREE]  # -1 - id replaces a token that was cut out of the text
        pieces = self._pieces(letters)
        batches = (pieces[first : first + _BATCH] for first in range(0, len(pieces), _BATCH))
        ids = np.concatenate([row for batch in batches for row in self.run_batch(batch, self._segment_batch)])
        stops = np.flatnonzero(ids == end).tolist()
        return [ids[start + 1 : stop] for start, stop in pairwise([-1, *stops])]

    def _pieces(self, letters: Letters) -> list[Letters]:
        """Return `letters` in pieces of about `PIECE` letters, which give the same ids as the full text."""
        begins = letters < 0
        if self.is_cut_at_words:
            begins[1:] |= (letters[1:] == ord(SPACE)) & (letters[:-1] != ord(SPACE))
        firsts = np.flatnonzero(begins)
        cuts = np.searchsorted(firsts, np.arange(gguf.PIECE, len(letters), gguf.PIECE))
        return np.split(letters, np.unique(firsts[cuts[cuts < len(firsts)]]))

    @cached_property
    def is_cut_at_words(self) -> bool:
        """True if no token crosses the beginning of a word."""
        return not any(_SEAM.search(token) for token in self.tokens)

    def _segment_batch(self, pieces: Sequence[Letters]) -> list[NDArray[np.integer[Any]]]:
        threads = min(environment.within_quota(environment.cores()), len(pieces))
        if threads == 1:
            return [self.segment(piece) for piece in pieces]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(self.segment, pieces))

    def lengths(self, text: str, ids: NDArray[np.integer[Any]]) -> Lengths:
        """Return the number of bytes (n,) of each id in a text between special tokens.

        A space that was added before the text has 0 bytes; a U+2581 that the text itself contains has 3.
        """
        lengths = super().lengths(text, ids)
        lengths[:1] -= int(self.adds_space)
        if SPACE not in text:
            return lengths
        sizes, spelt = (np.array([len(c.encode()) for c in t]) for t in (text, text.replace(SPACE, " ")))
        ends = np.interp(np.cumsum(lengths), np.cumsum([0, *spelt]), np.cumsum([0, *sizes]))
        widths: Lengths = np.diff(ends.astype(np.int64), prepend=0)
        return widths


class MergeTokenizer(SentencePieceTokenizer):
    """Tokenizer for GGUF keys whose `tokenizer.ggml.model` is "llama": byte-pair encoding with scores.

    Adjacent tokens are joined; the pair with the greatest score is joined first. A letter without a token
    becomes the tokens of its bytes, "<0x00>" and so on.
    """

    usual_ids: ClassVar = {"bos": 1, "eos": 2, "unknown": 0}
    usually_adds_bos = usually_adds_space = True

    def __init__(self, metadata: Mapping[str, object], place: str = THE_FILE) -> None:
        super().__init__(metadata, place)
        name = GGUFKeys(metadata, place).text(NAME) or ""
        # llama.cpp recognizes these models only by their name, so the name is among the kept keys.
        if any(family in name.lower() for family in ("phi-3", "phi3")):
            self._metadata[NAME] = name

    def stripping(self) -> frozenset[str]:
        if NAME not in self._metadata:
            return frozenset()
        standing = {t for t, kind in zip(self.tokens, self.types, strict=True) if kind in gguf.STANDING}
        return frozenset(standing - {"<unk>", "<s>", "<|endoftext|>"})

    def prepare(self, text: str) -> str:
        return (" " + text if self.adds_space else text).replace(" ", SPACE)

    def segment(self, letters: Letters) -> NDArray[np.int32]:
        from zero_mpi.data.tokenizers import segmentation

        of_letter, pairs = self._symbols
        symbols = of_letter[np.maximum(letters, 0)]
        symbols[letters < 0] = of_letter[-1]  # a symbol that is in no pair of the table
        space = int(of_letter[ord(SPACE)]) if self.is_cut_at_words else FREE
        links = segmentation.merge(symbols, *pairs, self._ranks, space)
        return segmentation.spell(symbols, links, letters, self._bytewise, self.vocab_size)

    @cached_property
    def _symbols(self) -> tuple[NDArray[np.int32], PairTable]:
        """Symbols of all code points, with the symbol of -1 last, and a table from pairs to joined symbols.

        Symbols are tokens, and letters that occur in tokens. Building the table of a large vocabulary takes a
        second.
        """
        symbols = dict(self.ids)
        for token in self.tokens:
            for letter in token:
                symbols.setdefault(letter, len(symbols))
        if len(symbols) >= MOST:
            raise UsageError(f"expected a vocabulary of fewer than {MOST} tokens and letters, found more")
        of_letter = np.full(0x110000 + 1, len(symbols), np.int32)
        for symbol, number in symbols.items():
            if len(symbol) == 1:
                of_letter[ord(symbol)] = number
        triples = [
            (symbols[token[:place]], symbols[token[place:]], number)
            for token, number in self.ids.items()
            for place in range(1, len(token))
            if token[:place] in symbols and token[place:] in symbols
        ]
        left, right, joined = np.array(triples, np.int64).reshape(-1, 3).T
        return of_letter, pair_table(left, right, joined)

    @cached_property
    def _ranks(self) -> NDArray[np.int64]:
        """Ranks (V,) of tokens by their scores: the token with the greatest score has rank 0."""
        return np.unique(-self.scores, return_inverse=True)[1].astype(np.int64)

    @cached_property
    def _bytewise(self) -> NDArray[np.int32]:
        """Token (256,) of each byte: "<0xNN>", else the character, else unknown, else `vocab_size`."""
        fallback = self.vocab_size if self.unknown is None else self.unknown
        names = [(f"<0x{byte:02X}>", chr(byte) if byte < 0x80 else "") for byte in range(256)]
        tokens = [next((self.ids[name] for name in pair if name in self.ids), fallback) for pair in names]
        return np.array(tokens, np.int32)


class UnigramTokenizer(SentencePieceTokenizer):
    """Tokenizer for GGUF keys whose `tokenizer.ggml.model` is "t5": it maximizes the sum of token scores.

    First the file's charsmap (mostly NFKC) normalizes the text. A letter without a token is unknown.
    """

    usual_ids: ClassVar = {"eos": 1, "unknown": 2, "padding": 0}

    def __init__(self, metadata: Mapping[str, object], place: str = THE_FILE) -> None:
        super().__init__(metadata, place)
        self.removes_spaces = bool(self._keys.flag(gguf.KEY + "remove_extra_whitespaces"))
        if self.unknown is None:
            raise UsageError(f"{place} names no unknown token: expected {gguf.KEY}unknown_token_id")
        self._unknown = self.unknown
        charsmap = self._keys.octets(CHARSMAP)
        self._nodes, self._spellings = np.zeros(0, np.int64), np.zeros(0, np.uint8)
        if charsmap:  # the size of a table, the table, and normalized spellings, each of which ends with 0
            size = int.from_bytes(charsmap[:4], "little")
            if len(charsmap) < 4 or size % 4 or not 0 < size < len(charsmap) - 4:
                raise self._keys.fault(CHARSMAP, "the size of a table, the table and spellings")
            self._nodes = np.frombuffer(charsmap, "<u4", size // 4, 4).astype(np.int64)
            self._spellings = np.frombuffer(charsmap, np.uint8, offset=4 + size)
            longest = np.diff(np.flatnonzero(self._spellings == 0), prepend=-1).max(initial=0) - 1
            if longest > MOST_SPELT:
                raise self._keys.fault(CHARSMAP, f"spellings of at most {MOST_SPELT} bytes, not {longest:,}")

    def prepare(self, text: str) -> str:
        """Return a text normalized by the charsmap, with spaces added or removed as the file says."""
        text = self._respell(text)
        if self.removes_spaces:
            return "".join([SPACE + word for word in text.split(" ") if word])
        bare = text.lstrip(" ")
        prefix = int(self.adds_space and bare != "")
        return SPACE * (len(text) - len(bare) + prefix) + bare.replace(" ", SPACE)

    def segment(self, letters: Letters) -> NDArray[np.int32]:
        from zero_mpi.data.tokenizers import segmentation

        nodes, ends = self._trie
        unknown = self._unknown, self._unknown_score
        return segmentation.likeliest(letters, *nodes, ends, self._wide_scores, unknown)

    @cached_property
    def is_cut_at_words(self) -> bool:
        """True if words can be encoded separately. An unknown space would merge with unknown letters."""
        return SPACE in self.ids and not any(_SEAM.search(token) for token in self.tokens)

    @cached_property
    def _trie(self) -> tuple[PairTable, NDArray[np.int32]]:
        """The table that maps a node and a letter to the next node, and the token of each last node."""
        types = (gguf.NORMAL, gguf.USER_DEFINED, gguf.UNUSED)
        kinds = zip(self.ids.items(), self.file_types, strict=True)
        nodes, ends = trie(dict(pair for pair, kind in kinds if kind in types))
        tokens = np.full(len(nodes) + 1, FREE, np.int32)
        tokens[list(ends)] = list(ends.values())
        pairs, node = np.fromiter(nodes, np.int64), np.fromiter(nodes.values(), np.int64)
        return pair_table(pairs >> BITS, pairs & (MOST - 1), node), tokens

    @cached_property
    def _wide_scores(self) -> NDArray[np.float64]:
        """Scores (V,); user-defined tokens have 0, which makes them more likely than all others."""
        return np.where(np.array(self.file_types) == gguf.USER_DEFINED, 0.0, self.scores.astype(np.float64))

    @cached_property
    def _unknown_score(self) -> float:
        normal = self.scores[np.array(self.file_types) == gguf.NORMAL]
        return float((normal.min() if normal.size else np.float32(0)) - _UNKNOWN_BELOW)

    def _respell(self, text: str) -> str:
        from zero_mpi.data.tokenizers import segmentation

        if not len(self._nodes):
            return text
        raw = np.frombuffer(text.encode(), np.uint8)
        out = np.empty(len(raw) + len(raw) // 8 + 64, np.uint8)
        limit = 16 * len(raw) + MOST_SPELT  # NFKC makes a text at most 11 times as long
        while len(out) < (length := segmentation.respell(raw, self._nodes, self._spellings, out)) <= limit:
            out = np.empty(length, np.uint8)
        if length == FREE or length > limit:
            expected = "a table that points only into itself and the spellings"
            raise self._keys.fault(CHARSMAP, f"{expected}, and makes a text at most 16 times as long")
        return out[:length].tobytes().decode(errors="replace")
