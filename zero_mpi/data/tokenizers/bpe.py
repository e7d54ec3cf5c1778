"""Byte-level BPE, set up from the keys of a model file. It gives the same ids as llama.cpp.

A GGUF holds the tokens, their types, the merges, and the name of the rule that splits text into words
(`pretokenizers`). The `tokenizers` library splits and merges; `gguf_tokenizer` does everything else. A byte
that is not in the vocabulary gives no id. Long texts are cut into pieces, which the library encodes in all
its threads. The ids are always the same as those of the full text.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zero_mpi.data.documents import in_groups
from zero_mpi.data.tokenizers import gguf_tokenizer as gguf
from zero_mpi.data.tokenizers.byte import Ids, Lengths, byte_characters
from zero_mpi.data.tokenizers.huggingface_rules import FLAGS, Rules, normalizer_of, tokenizers
from zero_mpi.data.tokenizers.pretokenizers import GPT2, PreTokenizer, pre_tokenizer
from zero_mpi.data.tokenizers.spellings import Spellings
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import show, shown
from zero_mpi.files.gguf_keys import MERGES, THE_FILE, GGUFKeys

_BATCH = 1 << 20  # characters encoded together; the results take 150 bytes for each character
# A text without seams is encoded in windows: characters of a window, and of the overlap of two windows.
_WINDOW, _OVERLAP = gguf.PIECE, 2 * gguf.LONGEST
# A seam is a place between a letter or digit and white space. No regex in `pretokenizers` looks across it.
_SEAM = re.compile(r"[^\W_](?=[ \t\r\n])")
_SEAM_OF_ASCII = re.compile(_SEAM.pattern, re.ASCII)


class BPETokenizer(gguf.GGUFTokenizer):
    """Tokenizer for GGUF keys whose `tokenizer.ggml.model` is "gpt2".

    Raises UsageError for keys that contradict each other, an unknown splitting rule, or a missing library.
    Like llama.cpp, it ignores the key `add_space_prefix`.
    """

    def __init__(self, metadata: Mapping[str, object], place: str = THE_FILE) -> None:
        keys = GGUFKeys(metadata, place)
        self.rules = Rules(keys)
        self.pre = self.rules.splitting(pre_tokenizer(keys.text(gguf.KEY + "pre"), place))
        self.usually_adds_bos = self.pre.add_bos
        super().__init__(metadata, place)
        self.merges = _merges(self._keys, self.ids)
        groups = self.ids_in_text().items() if self.rules.changes_cuts else ()
        self._finders = {special: self.rules.spellings(ids, normalized=True) for special, ids in groups}
        tokenizers()  # raises an error on all ranks now, instead of on rank 0 later

    def spellings(self, ids: Mapping[str, int]) -> Spellings:
        if not self.rules.changes_cuts:
            return super().spellings(ids)
        return self.rules.spellings(ids, normalized=False)

    def cut(self, text: str, special: bool, sizes: list[int] | None = None) -> gguf.Parts:
        parts = super().cut(text, special, sizes)
        if not self.rules.changes_cuts:
            return parts
        finder, spelt = self._finders[special], list[int | str]()
        for part in parts:
            spelt += [part] if isinstance(part, int) else finder.cut(self.rules.normalize(part))
        return [part for part in spelt if part != ""]

    def encode_with_lengths(self, documents: Sequence[bytes | str]) -> list[tuple[Ids, Lengths]]:
        if not self.rules.changes_cuts:
            return super().encode_with_lengths(documents)
        texts = [gguf.as_text(data) for data in documents]  # the library finds the bytes of each id
        encodings = self.library.encode_batch(texts, add_special_tokens=False)
        return [self._align(text, encoding) for text, encoding in zip(texts, encodings, strict=True)]

    def _align(self, text: str, encoding: Any) -> tuple[Ids, Lengths]:
        """Return the library's ids of a text, and how many of the text's bytes each id covers."""
        ids = np.array(encoding.ids, np.uint32)
        bytes_at = np.cumsum([0, *(len(letter.encode()) for letter in text)])
        begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        ends = np.maximum.accumulate(np.maximum(ends, np.append(begins[1:], len(text))[: len(ends)]))
        last = np.diff(ends, append=-1) != 0  # whether a token is the last one of its character
        spelt = np.cumsum(self.widths[ids])
        stops = np.interp(spelt, [0, *spelt[last]], [0, *bytes_at[ends[last]]])
        lengths: Lengths = np.diff(stops.astype(np.int64), prepend=0)
        return self._array(ids), lengths

    @cached_property
    def library(self) -> Any:
        """The library's tokenizer for full texts, without unused `[PADn]`, because readers add them again."""
        filler = {f"[PAD{place}]" for place, kind in enumerate(self.types) if kind == gguf.UNUSED}
        vocabulary = {token: place for token, place in self.ids.items() if token not in filler}
        tokenizer, lib = build(vocabulary, self.merges, self.pre, self.rules.normalizer), tokenizers()
        added = []
        for token, kind in zip(self.tokens, self.types, strict=True):
            if kind in gguf.STANDING:
                flags = {flag: flag in self.rules.flags.get(token, ()) for flag in FLAGS}
                added.append(lib.AddedToken(token, special=kind != gguf.USER_DEFINED, **flags))
        tokenizer.add_tokens(added)  # one call for all, because each call checks all earlier tokens again
        return tokenizer

    def ids_of_parts(self, documents: Sequence[gguf.Parts]) -> list[NDArray[np.integer[Any]]]:
        seam = _SEAM_OF_ASCII if self.pre.passes_letters else _SEAM
        cut = [[piece for part in parts for piece in pieces(part, seam)] for parts in documents]
        words = self._words([piece for group in cut for piece in group if isinstance(piece, str)])
        row = partial(np.array, dtype=np.uint32)
        by_part = ([row([p]) if isinstance(p, int) else next(words) for p in group] for group in cut)
        return [np.concatenate([row([]), *ids]) for ids in by_part]

    def _words(self, texts: Sequence[str]) -> Iterator[NDArray[np.integer[Any]]]:
        """Yield the ids of each text. Texts are encoded in groups with a limited number of characters."""
        for is_long, group in groupby(texts, lambda text: len(text) > 4 * _WINDOW):
            if is_long:
                yield from (np.concatenate(list(self._by_windows(text))) for text in group)
            else:
                for batch in in_groups(group, len, _BATCH):
                    yield from self.run_batch(batch, self._encode_words)

    def _encode_words(self, texts: Sequence[str]) -> list[NDArray[np.integer[Any]]]:
        encodings = self._encoder.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def _window(self, texts: Sequence[str]) -> list[NDArray[np.integer[Any]]]:
        """Return three arrays: id * 2 (+ 1 if the token ends a word), first and end character of tokens."""
        encoding = self._encoder.encode(texts[0], add_special_tokens=False)
        ends = np.diff(encoding.word_ids, append=-1) != 0
        return [np.array(encoding.ids, np.uint32) << 1 | ends, *np.array(encoding.offsets, np.uint32).T]

    def _by_windows(self, text: str) -> Iterator[NDArray[np.integer[Any]]]:
        """Yield the ids of a long text without seams, by encoding overlapping windows.

        Merges join the pair of the lowest rank first, and the leftmost of equal pairs. So a row of tokens
        encodes a word if each pair of neighbours, encoded alone, gives the same two tokens. A window begins
        at a token of the previous one. If both windows have the same tokens in their overlap, the tokens of
        the previous one up to there and all of the new one form such a row. Else a larger window is used.
        """
        start, size, window = 0, _WINDOW, list[NDArray[np.integer[Any]]]()
        while True:
            ids, firsts, stops = window or self.run_batch([text[start : start + size]], self._window)
            if start + size >= len(text):
                yield ids >> 1
                return
            end = int(np.searchsorted(stops, size - _OVERLAP // 2, "right"))
            edges = np.arange(max(1, int(np.searchsorted(firsts, size - _OVERLAP))), end)
            edges = edges[firsts[edges] == stops[edges - 1]]  # a window must not begin inside a character
            edges = edges[np.argsort(ids[edges - 1] & 1 == 0, kind="stable")]  # prefer beginnings of words
            # Inside white space, the following text can move the beginning of a word.
            seams = (
                edge for edge in edges if not text[(at := start + int(firsts[edge])) - 1 : at + 1].isspace()
            )
            edge = next(seams, end)
            at = start + int(firsts[edge])
            window = self.run_batch([text[at : at + size]], self._window)
            if edge < end and np.array_equal(ids[edge:end], window[0][: end - edge]):
                yield ids[:edge] >> 1
                start = at
            else:
                size, window = 2 * size, []

    def spelling(self, token: str, kind: int) -> bytes:
        if kind == gguf.NORMAL:  # characters that stand for no byte stay as they are
            return b"".join([bytes([_BYTES[c]]) if c in _BYTES else c.encode() for c in token])
        return token.encode() if kind == gguf.USER_DEFINED else b""

    @cached_property
    def _encoder(self) -> Any:
        """The library's tokenizer for the text between special tokens, created at first use.

        A byte without a token gets an id above the vocabulary, which is dropped after merging. The library
        would drop the byte before it merges, and then bytes from both sides of it could become one token.
        """
        missing = [character for character in byte_characters() if character not in self.ids]
        vocabulary = self.ids | {character: self.vocab_size + i for i, character in enumerate(missing)}
        return build(vocabulary, self.merges, self.pre)


_BYTES = {character: byte for byte, character in enumerate(byte_characters())}


def build(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], words: PreTokenizer, normalizer: Any = None
) -> Any:
    """Return a tokenizer of the library made of these parts. Raise UsageError if the library rejects them."""
    lib = tokenizers()
    pre = lib.pre_tokenizers
    is_gpt2 = words.regexes[-1] == GPT2  # the library has a faster, compiled form of this regex
    cuts = [pre.Split(lib.Regex(regex), "isolated") for regex in words.regexes[: -1 if is_gpt2 else None]]
    bytewise = pre.ByteLevel(add_prefix_space=False, use_regex=is_gpt2)
    try:
        tokenizer = lib.Tokenizer(lib.models.BPE(vocabulary, merges, ignore_merges=words.ignore_merges))
        if normalizer is not None:
            tokenizer.normalizer = normalizer_of(normalizer)
    except Exception as error:  # the library only raises plain Exception
        reason = shown(str(error))
        raise UsageError(f"the package tokenizers refuses the model file's tokenizer: {reason}") from error
    tokenizer.pre_tokenizer = pre.Sequence([*cuts, bytewise])
    tokenizer.decoder = lib.decoders.ByteLevel()
    return tokenizer


def _merges(keys: GGUFKeys, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the merges as pairs in order of their rank, without repeated pairs."""
    merges = list(dict.fromkeys(keys.texts(MERGES) or []))
    pairs = [(left, right) for left, _, right in [merge.partition(" ") for merge in merges]]
    for merge, (left, right) in zip(merges, pairs, strict=True):
        if not (left and right and left + right in ids):
            raise UsageError(
                f"{keys.place}: {MERGES}: expected two parts of a token with a space between them, "
                f"found {show(merge)}"
            )
    if not pairs:
        raise UsageError(f"{keys.place} has no {MERGES}: expected at least one")
    return pairs


def pieces(part: int | str, seam: re.Pattern[str] = _SEAM) -> Iterator[int | str]:
    """Yield a text in pieces of about `PIECE` characters, which give the same ids; yield an id unchanged."""
    if isinstance(part, int) or len(part) <= gguf.PIECE:
        yield part
        return
    start = 0
    while len(part) - start > gguf.PIECE and (match := seam.search(part, start + gguf.PIECE)):
        yield part[start : match.end()]
        start = match.end()
    if start < len(part):
        yield part[start:]
