"""Byte-level BPE as a model file describes it: the ids are those of llama.cpp.

A GGUF holds the tokens, their types and the merges, and names the splitting into words (`pretokenizers`). The
`tokenizers` library splits and merges; what lies around that is `gguf_tokenizer`'s, but for a byte that the
vocabulary lacks: it gives nothing. Long texts go through the library in pieces, on all its threads, always
with the same ids.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zero_mpi.data.tokenizers.byte import byte_characters
from zero_mpi.data.tokenizers.gguf_tokenizer import KEY, NORMAL, PIECE, USER_DEFINED, GGUFTokenizer, Parts
from zero_mpi.data.tokenizers.pretokenizers import GPT2, pre_tokenizer
from zero_mpi.errors import UsageError, import_optional
from zero_mpi.files.foreign import show, shown
from zero_mpi.files.gguf_keys import MERGES, THE_FILE, GGUFKeys

_BATCH = 1 << 22  # characters under way at once: its answers take 150 bytes for a character
# Between a letter or digit and white space: no regex of the table reaches over this place or looks across it.
_SEAM = re.compile(r"[^\W_](?=[ \t\r\n])")


def tokenizers() -> Any:
    """The package `tokenizers`. UsageError, with the remedy, where it is not installed."""
    return import_optional("this model's tokenizer", "tokenizers", "tokenizers")


class BPETokenizer(GGUFTokenizer):
    """The tokenizer of GGUF keys whose `tokenizer.ggml.model` is "gpt2".

    UsageError for keys that do not fit together, a splitting that is not known, or a missing library. Like
    llama.cpp it has no use for `add_space_prefix` in this kind.
    """

    def __init__(self, metadata: Mapping[str, object], place: str = THE_FILE) -> None:
        self.pre = pre_tokenizer(GGUFKeys(metadata, place).text(KEY + "pre"), place)
        super().__init__(metadata, place)
        self.merges = _merges(self._keys, self.ids)
        tokenizers()  # now, and not when only rank 0 encodes

    def adds_bos(self) -> bool:
        """As llama.cpp ties it to the splitting."""
        return self.pre.add_bos

    def ids_of_parts(self, documents: Sequence[Parts]) -> list[NDArray[np.integer[Any]]]:
        """The ids of each document; one beyond the vocabulary gives nothing."""
        cut = [[piece for part in parts for piece in pieces(part)] for parts in documents]
        found = self._words([piece for each in cut for piece in each if isinstance(piece, str)])
        by_part = ([[p] if isinstance(p, int) else next(found) for p in each] for each in cut)
        return [np.array(list(chain.from_iterable(ids)), np.uint32) for ids in by_part]

    def _words(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """The library's ids of each text, a limited number of characters at a time."""
        start = 0
        while start < len(texts):
            stop, size = start, 0
            while stop < len(texts) and size < _BATCH:
                size += len(texts[stop])
                stop += 1
            batch = self._encoder.encode_batch_fast(texts[start:stop], add_special_tokens=False)
            yield from (encoding.ids for encoding in batch)
            start = stop

    def spelling(self, token: str, kind: int) -> bytes:
        """The bytes of a token in a text. A character outside the byte alphabet stands for itself."""
        if kind == NORMAL:
            return b"".join([bytes([_BYTES[c]]) if c in _BYTES else c.encode() for c in token])
        return token.encode() if kind == USER_DEFINED else b""

    @cached_property
    def _encoder(self) -> Any:
        """The library's tokenizer, for text without tokens that stand in it; made where it is used.

        A byte without a token gets an id behind the vocabulary, to be dropped: the library would skip it
        before it merges, and bytes from both sides of it could become one token.
        """
        lacking = [character for character in byte_characters() if character not in self.ids]
        vocabulary = self.ids | {character: self.vocab_size + i for i, character in enumerate(lacking)}
        return build(vocabulary, self.merges, self.pre.regexes, self.pre.ignore_merges)


_BYTES = {character: byte for byte, character in enumerate(byte_characters())}


def build(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], regexes: Sequence[str], ignore_merges: bool
) -> Any:
    """A tokenizer of the library with these parts. UsageError if it refuses them."""
    lib = tokenizers()
    pre = lib.pre_tokenizers
    by_itself = regexes[-1] == GPT2  # which the library has compiled in, faster
    cuts = [pre.Split(lib.Regex(regex), "isolated") for regex in regexes[: -1 if by_itself else None]]
    bytewise = pre.ByteLevel(add_prefix_space=False, use_regex=by_itself)
    try:
        tokenizer = lib.Tokenizer(lib.models.BPE(vocabulary, merges, ignore_merges=ignore_merges))
    except Exception as error:  # the library raises nothing more special
        why = shown(str(error))
        raise UsageError(f"the package tokenizers refuses the model file's tokenizer: {why}") from error
    tokenizer.pre_tokenizer = pre.Sequence([*cuts, bytewise])
    tokenizer.decoder = lib.decoders.ByteLevel()
    return tokenizer


def _merges(keys: GGUFKeys, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Pairs in the order of their rank, each where it comes first."""
    merges: dict[tuple[str, str], None] = {}
    for merge in keys.texts(MERGES) or []:
        left, _, right = merge.partition(" ")
        if not (left and right and left + right in ids):
            raise UsageError(
                f"{keys.place}: {MERGES}: expected two parts of a token with a space between them, "
                f"found {show(merge)}"
            )
        merges.setdefault((left, right))
    if not merges:
        raise UsageError(f"{keys.place} has no {MERGES}: expected at least one")
    return list(merges)


def pieces(part: int | str) -> Iterator[int | str]:
    """A text in pieces of about `PIECE` characters, which have the ids of the whole; an id as it is."""
    if isinstance(part, int) or len(part) <= PIECE:
        yield part
        return
    start = 0
    while len(part) - start > PIECE and (seam := _SEAM.search(part, start + PIECE)):
        yield part[start : seam.end()]
        start = seam.end()
    if start < len(part):
        yield part[start:]
