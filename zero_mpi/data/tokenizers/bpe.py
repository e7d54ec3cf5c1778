"""Byte-level BPE as a model file describes it: the ids are those of llama.cpp.

A GGUF holds the tokens, their types and the merges, and names the splitting into words (`pretokenizers`). The
`tokenizers` library splits and merges; what lies around that is done here, as llama.cpp does it: tokens
that stand in the text themselves are cut out longest first, before anything else; a control token is read
only where it is asked for, so that a document which mentions one stays text; a byte that the vocabulary lacks
gives nothing. Long texts go through the library in pieces, on all its threads, always with the same ids.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from zero_mpi.data.tokenizers.byte import byte_characters
from zero_mpi.data.tokenizers.pretokenizers import pre_tokenizer
from zero_mpi.data.tokenizers.spellings import Spellings
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import show, shown
from zero_mpi.files.gguf_keys import MERGES, THE_FILE, TOKENS, TYPES, GGUFKeys

Ids = NDArray[np.unsignedinteger[Any]]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # llama.cpp's token types
_KEY = "tokenizer.ggml."
_PIECE = 1 << 16  # characters that the library takes as one text
_BATCH = 1 << 22  # characters under way at once: its answers take 150 bytes for a character
# Between a letter or digit and white space: no regex of the table reaches over this place or looks across it.
_SEAM = re.compile(r"[^\W_](?=[ \t\r\n])")
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
# Tokens that end a text, and are control tokens whatever the file says (`special_eog_ids` in llama.cpp).
_ENDS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"}
    | {"<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>"}
    | {"<|end_of_text|>", "<end_of_utterance>", "<turn|>", "<|tool_response>", "[e~["}
    | {"<｜end▁of▁sentence｜>"}  # noqa: RUF001 (spelt so)
)


def library() -> Any:
    """The package `tokenizers`. UsageError, with the remedy, where it is not installed."""
    try:
        import tokenizers
    except ImportError as error:
        raise UsageError(
            "this model's tokenizer needs the package tokenizers: pip install 'zero-mpi[tokenizers]'"
        ) from error
    return tokenizers


class BPETokenizer:
    """The tokenizer of GGUF keys whose `tokenizer.ggml.model` is "gpt2".

    UsageError for keys that do not fit together, a splitting that is not known, or a missing library. Like
    llama.cpp it has no use for `add_space_prefix` in this kind, and `add_eos_token` is not followed: a prompt
    is to be continued, and the corpus ends its documents anyway.
    """

    def __init__(self, metadata: Mapping[str, object], place: str = THE_FILE) -> None:
        self._metadata = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
        self._keys = keys = GGUFKeys(self._metadata, place)
        self.pre = pre_tokenizer(keys.text(_KEY + "pre"), place)
        self.tokens = _tokens(keys)
        self.ids = {token: place for place, token in enumerate(self.tokens)}
        self.vocab_size = len(self.tokens)
        self.types = self._types()
        self.merges = _merges(keys, self.ids)
        self.bos, self.eos = self.special_id("bos"), self.special_id("eos")
        asked = keys.flag(_KEY + "add_bos_token")
        self.add_bos = self.pre.add_bos if asked is None else asked
        if self.add_bos and self.bos is None:
            raise UsageError(f"{place} asks for a bos token and names none: expected {_KEY}bos_token_id")
        self.ends = self._ends()
        library()  # now, and not when only rank 0 encodes

    def encode(self, data: bytes | str, *, special: bool = False) -> Ids:
        """Ids (n,) of `data`, uint16 if the vocabulary fits, else uint32. No bos or eos is added.

        A byte that is not UTF-8 becomes U+FFFD. `special`: control tokens in the text are read as such.
        """
        return self.encode_batch([data], special=special)[0]

    def encode_batch(self, documents: Sequence[bytes | str], *, special: bool = False) -> list[Ids]:
        """`encode` of each, on all threads of the library (TOKENIZERS_PARALLELISM=false: on one)."""
        cut = [list(self._parts(_text(data), special)) for data in documents]
        found = self._words([part for parts in cut for part in parts if isinstance(part, str)])
        return [
            self._array([i for part in parts for i in ([part] if isinstance(part, int) else next(found))])
            for parts in cut
        ]

    def spelt(self, documents: Sequence[bytes | str]) -> Counter[str]:
        """How often the texts hold each token that is read as one by `special` only."""
        cut = (part for data in documents for part in self._standing[True].cut(_text(data)))
        return Counter(
            self.tokens[part]
            for part in cut
            if isinstance(part, int) and self.types[part] in (UNKNOWN, CONTROL)
        )

    def encode_prompt(self, text: str) -> Ids:
        """Ids to continue: bos first if the file asks for it, control tokens read as such.

        Nothing at all becomes the token that ends a document, as what follows one begins the next.
        """
        ids = self.encode(text, special=True).tolist()
        first = [self.bos] if self.add_bos and self.bos is not None else []
        edge = [i for i in (self.eos, self.bos) if i is not None][:1]
        return self._array(first + ids or edge)

    def decode(self, ids: ArrayLike) -> bytes:
        """The bytes behind `ids`, any shape, in C order; control and unused tokens give nothing.

        Raises ValueError for an id outside the vocabulary.
        """
        flat = np.asarray(ids).ravel()
        strange = flat[(flat < 0) | (flat >= self.vocab_size)]
        if strange.size:
            raise ValueError(f"id {strange[0]} is outside the vocabulary of {self.vocab_size}")
        return b"".join([self._bytes[i] for i in flat.tolist()])

    def metadata(self) -> dict[str, object]:
        """The `tokenizer.*` keys that it was made from, unchanged."""
        return dict(self._metadata)

    def special_id(self, name: str) -> int | None:
        """The id of `tokenizer.ggml.NAME_token_id`; None without such a key."""
        return self._keys.token_id(name, self.vocab_size)

    def _types(self) -> list[int]:
        """The type of each token; all are normal where the file does not say."""
        types = self._keys.wholes(TYPES, self.vocab_size) or [NORMAL] * self.vocab_size
        return [CONTROL if token in _ENDS else kind for token, kind in zip(self.tokens, types, strict=True)]

    def _ends(self) -> frozenset[int]:
        """Tokens after which a text is over."""
        named = [self.eos, self.special_id("eot"), self.special_id("eom")]
        known = [self.ids[token] for token in _ENDS if token in self.ids]
        return frozenset(known + [i for i in named if i is not None])

    @cached_property
    def _encoder(self) -> Any:
        """The library's tokenizer, for text without tokens that stand in it; made where it is used.

        A byte without a token gets an id behind the vocabulary, to be dropped: the library would skip it
        before it merges, and bytes from both sides of it could become one token.
        """
        lacking = [character for character in byte_characters() if character not in self.ids]
        vocabulary = self.ids | {character: self.vocab_size + i for i, character in enumerate(lacking)}
        return build(vocabulary, self.merges, self.pre.regexes, self.pre.ignore_merges)

    @cached_property
    def _bytes(self) -> list[bytes]:
        """What each id stands for in a text."""
        table = {character: byte for byte, character in enumerate(byte_characters())}
        return [_piece(token, kind, table) for token, kind in zip(self.tokens, self.types, strict=True)]

    @cached_property
    def _standing(self) -> dict[bool, Spellings]:
        """Tokens to look for in a text: with the control tokens, or only the user's."""
        kinds = {True: (UNKNOWN, CONTROL, USER_DEFINED), False: (USER_DEFINED,)}
        return {
            special: Spellings({t: place for t, place in self.ids.items() if self.types[place] in wanted})
            for special, wanted in kinds.items()
        }

    def _parts(self, text: str, special: bool) -> Iterator[int | str]:
        """`text` as ids that stood in it, and pieces of what is left."""
        for part in self._standing[special].cut(text):
            yield from [part] if isinstance(part, int) else _pieces(part)

    def _words(self, texts: list[str]) -> Iterator[list[int]]:
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

    def _array(self, ids: list[int]) -> Ids:
        array = np.array(ids, np.uint32)
        array = array[array < self.vocab_size]
        return array.astype(np.uint16) if self.vocab_size <= 1 << 16 else array


def build(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], regexes: Sequence[str], ignore_merges: bool
) -> Any:
    """A tokenizer of the library with these parts. UsageError if it refuses them."""
    lib = library()
    pre = lib.pre_tokenizers
    cuts = [pre.Split(lib.Regex(regex), "isolated") for regex in regexes]
    bytewise = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    try:
        tokenizer = lib.Tokenizer(lib.models.BPE(vocabulary, merges, ignore_merges=ignore_merges))
    except Exception as error:  # the library raises nothing more special
        why = shown(str(error))
        raise UsageError(f"the package tokenizers refuses the model file's tokenizer: {why}") from error
    tokenizer.pre_tokenizer = pre.Sequence([*cuts, bytewise])
    tokenizer.decoder = lib.decoders.ByteLevel()
    return tokenizer


def _tokens(keys: GGUFKeys) -> list[str]:
    """The tokens in the order of their ids; an empty one is named as llama.cpp names it."""
    tokens = [token or f"[EMPTY_{place}]" for place, token in enumerate(keys.texts(TOKENS) or [])]
    if not tokens:
        raise UsageError(f"{keys.place} has no {TOKENS}: expected a vocabulary")
    if len(set(tokens)) < len(tokens):
        twice = show(Counter(tokens).most_common(1)[0][0])
        raise UsageError(f"{keys.place}: {TOKENS}: expected each token once, found {twice} again")
    return tokens


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


def _piece(token: str, kind: int, table: Mapping[str, int]) -> bytes:
    """The bytes of a token in a text. A character outside the byte alphabet stands for itself."""
    if kind == NORMAL:
        return b"".join([bytes([table[c]]) if c in table else c.encode() for c in token])
    return token.encode() if kind == USER_DEFINED else b""


def _text(data: bytes | str) -> str:
    """`data` as text, U+FFFD for every byte that is not UTF-8."""
    raw = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return _NOT_UTF8.sub("\ufffd", raw.decode("utf-8", "surrogateescape"))


def _pieces(text: str) -> Iterator[str]:
    """`text` in pieces of about `_PIECE` characters, which have the ids of the whole."""
    start = 0
    while len(text) - start > _PIECE and (seam := _SEAM.search(text, start + _PIECE)):
        yield text[start : seam.end()]
        start = seam.end()
    if start < len(text):
        yield text[start:]
