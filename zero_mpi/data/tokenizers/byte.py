"""Interface of tokenizers, a reader of texts, and the byte tokenizer, in which each byte is its own id.

In a GGUF, the byte tokenizer has a GPT-2 vocabulary: byte b is written as the printable character of GPT-2's
byte-to-unicode map, and three special tokens follow. Readers require at least one merge. So there is a merge
that never applies; the vocabulary has its two halves and the joined token.

A text may spell control tokens such as <|im_start|>. In a text about models, or in an untrusted text, they
are meant as characters; in a conversation that a template wrote, they are meant as tokens. A flag says how to
read them. Without the flag they are read as characters, and the user gets a note.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from zero_mpi.data.tokenizers.spellings import Spellings
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.files.gguf_keys import TEMPLATE, THE_FILE, TOKENIZER, TOKENS, GGUFKeys

Ids = NDArray[np.unsignedinteger[Any]]
Lengths = NDArray[np.int64]

_BYTES = 256
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5  # llama.cpp's token types
_SPECIAL = ("<|bos|>", "<|endoftext|>", "<|pad|>")
_SPELLINGS = Spellings({token: _BYTES + place for place, token in enumerate(_SPECIAL)})
_LENGTHS = np.array([1] * _BYTES + [len(token) for token in _SPECIAL], np.int64)
_MODEL = "gpt2"
AUTO, ALWAYS, NEVER = BOS = ("auto", "always", "never")
PARSE, PLAIN = READINGS = ("parse", "plain")


def byte_characters() -> list[str]:
    """Return GPT-2's map from bytes to printable characters (Radford et al. 2019, `bytes_to_unicode`)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(_BYTES) if byte not in printable]
    codes = {byte: _BYTES + place for place, byte in enumerate(others)}
    return [chr(codes.get(byte, byte)) for byte in range(_BYTES)]


class Tokenizer(ABC):
    """Interface of tokenizers for training and generation."""

    vocab_size: int
    bos: int | None  # token that begins a text, or None
    add_bos: bool  # whether the model expects bos in front of a text
    eos: int | None  # token that ends a text, or None
    ends: frozenset[int]  # all tokens that end a text

    def encode(self, data: bytes | str, *, special: bool = False) -> Ids:
        """Return the ids (n,) of `data`, as uint16 or uint32, without bos and eos.

        `special`: whether control tokens in the text are read as tokens; otherwise they are plain characters.
        """
        return self.encode_batch([data], special=special)[0]

    @abstractmethod
    def encode_batch(self, documents: Sequence[bytes | str], *, special: bool = False) -> list[Ids]:
        """Return the ids of each text, as from `encode`."""

    @abstractmethod
    def encode_with_lengths(self, documents: Sequence[bytes | str]) -> list[tuple[Ids, Lengths]]:
        """Return each text's ids and each id's number of bytes; spelt control tokens are read as tokens."""

    @abstractmethod
    def spelt(self, documents: Sequence[bytes | str]) -> Counter[str]:
        """Return how often the texts spell each token that is only read as a token with `special`."""

    @abstractmethod
    def encode_prompt(self, text: str) -> Ids:
        """Return the ids of a text that the model shall continue, after the ids that the model expects first.

        If there are no ids, return the token that ends a document, because a new document begins after it.
        """

    @abstractmethod
    def decode(self, ids: ArrayLike) -> bytes:
        """Return the bytes of `ids` (any shape, in C order). A token that is not text has no bytes.

        Raises ValueError for an id outside the vocabulary.
        """

    @abstractmethod
    def metadata(self) -> dict[str, object]:
        """Return the `tokenizer.*` keys for a GGUF, and the model's name if llama.cpp chooses rules by it."""


class ByteTokenizer(Tokenizer):
    """Tokenizer with 260 ids: 256 bytes, bos, eos, pad, and the joined token of the unused merge.

    The argument is its chat template, if any. Text is encoded as UTF-8. If a command line is not UTF-8,
    Python keeps its undecodable bytes in strings; they are encoded as the original bytes.
    """

    bos, eos, pad = 256, 257, 258
    vocab_size = 260
    add_bos = False
    ends = frozenset({eos})

    def __init__(self, chat_template: str | None = None) -> None:
        self._template = {} if chat_template is None else {TEMPLATE: chat_template}

    def encode_batch(self, documents: Sequence[bytes | str], *, special: bool = False) -> list[Ids]:
        if not special:
            return [np.frombuffer(raw_bytes(data), np.uint8).astype(np.uint16) for data in documents]
        return [np.concatenate([_ids(part) for part in _cut(data)]) for data in documents]

    def encode_with_lengths(self, documents: Sequence[bytes | str]) -> list[tuple[Ids, Lengths]]:
        return [(ids, _LENGTHS[ids]) for ids in self.encode_batch(documents, special=True)]

    def spelt(self, documents: Sequence[bytes | str]) -> Counter[str]:
        cut = (part for data in documents for part in _cut(data))
        return Counter(_SPECIAL[part - _BYTES] for part in cut if isinstance(part, int))

    def encode_prompt(self, text: str) -> Ids:
        return self.encode(text, special=True) if text else np.array([self.eos], np.uint16)

    def decode(self, ids: ArrayLike) -> bytes:
        flat = flat_ids(ids, self.vocab_size, "byte vocabulary")
        return flat[flat < _BYTES].astype(np.uint8).tobytes()

    def metadata(self) -> dict[str, object]:
        """Return the `tokenizer.ggml.*` keys for a GGUF, as NumPy values of the width that the file needs."""
        bos, eos, _ = _SPECIAL
        return {
            "tokenizer.ggml.model": _MODEL,
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [*byte_characters(), *_SPECIAL, bos + eos],
            "tokenizer.ggml.token_type": np.array([_NORMAL] * _BYTES + [_CONTROL] * 3 + [_UNUSED], np.int32),
            "tokenizer.ggml.merges": [f"{bos} {eos}"],
            "tokenizer.ggml.bos_token_id": np.uint32(self.bos),
            "tokenizer.ggml.eos_token_id": np.uint32(self.eos),
            "tokenizer.ggml.padding_token_id": np.uint32(self.pad),
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.ggml.add_eos_token": False,
            "tokenizer.ggml.add_space_prefix": False,
            **self._template,
        }

    @classmethod
    def is_in(cls, metadata: Mapping[str, object], place: str = THE_FILE) -> bool:
        """Return whether a GGUF's keys, by their model and tokens, describe the byte tokenizer."""
        keys = GGUFKeys(metadata, place)
        return keys.text(TOKENIZER) == _MODEL and keys.texts(TOKENS) == cls().metadata()[TOKENS]


def flat_ids(ids: ArrayLike, vocab: int, label: str = "vocabulary") -> NDArray[Any]:
    """Return ids (n,) in C order. Raise ValueError for an id outside the vocabulary."""
    flat = np.asarray(ids).ravel()
    invalid = flat[(flat < 0) | (flat >= vocab)]
    if invalid.size:
        raise ValueError(f"id {invalid[0]} is outside the {label} of {vocab}")
    return flat


def raw_bytes(data: bytes | str) -> bytes:
    return data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data


def _cut(data: bytes | str) -> list[int | str]:
    """Return the ids of control tokens spelt in `data`, and the text between them, one letter per byte."""
    return _SPELLINGS.cut(raw_bytes(data).decode("latin-1"))


def _ids(part: int | str) -> NDArray[np.uint16]:
    if isinstance(part, int):
        return np.array([part], np.uint16)
    return np.frombuffer(part.encode("latin-1"), np.uint8).astype(np.uint16)


def bos_of(tokenizer: Tokenizer | None, choice: str) -> int | None:
    """Return the id that `--bos` puts before a text; None if it puts none, or without a tokenizer.

    AUTO follows the tokenizer's `add_bos`. Raises UsageError for ALWAYS if the tokenizer has no bos.
    """
    if tokenizer is None or choice == NEVER or (choice == AUTO and not tokenizer.add_bos):
        return None
    if tokenizer.bos is None:
        raise UsageError(f"--bos {choice}: the tokenizer has no bos token: use --bos {NEVER}")
    return tokenizer.bos


def with_bos(ids: NDArray[Any], bos: int | None) -> NDArray[Any]:
    """Return ids (n,) with bos in front, unless bos is None or the ids begin with it already."""
    return ids if bos is None or ids[:1].tolist() == [bos] else np.insert(ids, 0, bos)


class TextReader:
    """Reader of texts. `setting`: value of --control-tokens, PARSE or PLAIN; None: the flag is not given.

    Without the flag, control tokens are read as with PLAIN and counted for `notes`. Text that a template
    wrote is always read with PARSE.
    """

    def __init__(self, tokenizer: Tokenizer, setting: str | None = None) -> None:
        self.tokenizer, self.setting, self.parses = tokenizer, setting, setting == PARSE
        self.spelt = Counter[str]()

    def anew(self) -> TextReader:
        """Return another reader with the same settings, whose counts begin at zero."""
        return TextReader(self.tokenizer, self.setting)

    def encode(self, texts: Sequence[bytes | str]) -> list[Ids]:
        """Return the ids (n,) of each text, uint16 or uint32, without bos and eos."""
        if self.setting is None:
            self.spelt += self.tokenizer.spelt(texts)
        return self.tokenizer.encode_batch(texts, special=self.parses)

    def notes(self) -> Iterator[str]:
        """Yield a note on the control tokens that texts spelt so far, if no flag says how to read them."""
        if self.spelt:
            examples = [f"{shown(token, 60)} {count:,}" for token, count in self.spelt.most_common(3)]
            dots = ", ..." if len(self.spelt) > 3 else ""
            yield (
                f"special tokens in the text: {self.spelt.total():,} ({', '.join(examples)}{dots}), read as "
                f"plain characters; --control-tokens {PARSE} reads them as tokens, --control-tokens {PLAIN} "
                "confirms plain characters"
            )
