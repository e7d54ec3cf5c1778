"""Interface of tokenizers, and the byte tokenizer: the id of a byte is the byte.

So it can represent any data without training. In a GGUF the same vocabulary is a GPT-2 one
(llama.cpp's "gpt2" model): byte b is written as the printable character that GPT-2's byte-to-unicode map
gives it, three special tokens follow, and one merge that never applies, because readers ask for at least one
and want both its halves and the joined token in the vocabulary. The "llama" (SentencePiece) kind with <0xNN>
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from zero_mpi.data.tokenizers.spellings import Spellings
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.files.gguf_keys import TEMPLATE, THE_FILE, TOKENIZER, TOKENS, GGUFKeys

_BYTES = 256
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5  # llama.cpp's token types
_SPECIAL = ("<|bos|>", "<|endoftext|>", "<|pad|>")
_SPELLINGS = Spellings({token: _BYTES + place for place, token in enumerate(_SPECIAL)})
_LENGTHS = np.array([1] * _BYTES + [len(token) for token in _SPECIAL], np.int64)
_MODEL = "gpt2"


def byte_characters() -> list[str]:
    """Return GPT-2's map from bytes to printable characters (Radford et al. 2019, `bytes_to_unicode`)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(_BYTES) if byte not in printable]
    moved = {byte: _BYTES + place for place, byte in enumerate(others)}
    return [chr(moved.get(byte, byte)) for byte in range(_BYTES)]


class Tokenizer(Protocol):
    """Interface of a tokenizer for training and generation."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""

    @property
    def bos(self) -> int | None:
        """Token that begins a text, if there is one."""

    @property
    def add_bos(self) -> bool:
        """Tell whether the model asks for bos in front of a text."""

    @property
    def eos(self) -> int | None:
        """Token that ends a text, if there is one."""

    @property
    def ends(self) -> frozenset[int]:
        """All tokens that end a text."""

    def encode(self, data: bytes | str, *, special: bool = False) -> NDArray[np.unsignedinteger[Any]]:
        """Return the ids (n,) of `data`, uint16 or uint32, without bos and eos.

        `special`: control tokens that are spelt in it are read as such; else they are ordinary text.
        """

    def encode_batch(
        self, documents: Sequence[bytes | str], *, special: bool = False
    ) -> list[NDArray[np.unsignedinteger[Any]]]:
        """Return `encode` of each text."""

    def encode_with_lengths(
        self, documents: Sequence[bytes | str]
    ) -> list[tuple[NDArray[np.unsignedinteger[Any]], NDArray[np.int64]]]:
        """Return each text's ids, control tokens read as such, and the bytes (n,) that each id stands for."""

    def spelt(self, documents: Sequence[bytes | str]) -> Counter[str]:
        """Return how often the texts hold each token that is read as one only with `special`."""

    def encode_prompt(self, text: str) -> NDArray[np.unsignedinteger[Any]]:
        """Return the ids of a text that a model is to continue, with the ids that must stand before it."""

    def decode(self, ids: ArrayLike) -> bytes:
        """Return the bytes of `ids`; tokens that are not text give nothing."""

    def metadata(self) -> dict[str, object]:
        """Return the `tokenizer.*` keys of a GGUF, and its name if llama.cpp reads text by the name."""


class ByteTokenizer:
    """Tokenizer of 256 bytes, bos, eos, pad, and the token of the formal merge: 260 ids.

    It has the chat template that it is given, if any.
    """

    bos = 256
    add_bos = False
    eos = 257
    pad = 258
    vocab_size = 260
    ends = frozenset({257})

    def __init__(self, chat_template: str | None = None) -> None:
        self._template = {} if chat_template is None else {TEMPLATE: chat_template}

    def encode(self, data: bytes | str, *, special: bool = False) -> NDArray[np.uint16]:
        """Return the ids of `data`, shape (number of bytes,); text becomes UTF-8. No bos or eos is added.

        Bytes that Python smuggled into a string (a command line that is not UTF-8) are restored.
        `special`: a control token that is spelt in it becomes its one id.
        """
        raw = _raw(data)
        if not special:
            return np.frombuffer(raw, dtype=np.uint8).astype(np.uint16)
        return np.concatenate([_ids(part) for part in _cut(raw)])

    def encode_batch(
        self, documents: Sequence[bytes | str], *, special: bool = False
    ) -> list[NDArray[np.unsignedinteger[Any]]]:
        return [self.encode(data, special=special) for data in documents]

    def encode_with_lengths(
        self, documents: Sequence[bytes | str]
    ) -> list[tuple[NDArray[np.unsignedinteger[Any]], NDArray[np.int64]]]:
        """Return each text's ids, control tokens read as such, and the bytes (n,) that each id stands for."""
        found = self.encode_batch(documents, special=True)
        return [(ids, _LENGTHS[ids]) for ids in found]

    def spelt(self, documents: Sequence[bytes | str]) -> Counter[str]:
        """Return how often the texts spell bos, eos and pad."""
        cut = (part for data in documents for part in _cut(_raw(data)))
        return Counter(_SPECIAL[part - _BYTES] for part in cut if isinstance(part, int))

    def encode_prompt(self, text: str) -> NDArray[np.uint16]:
        """Return ids to continue, control tokens read as such.

        An empty text becomes eos, because the next document begins after it.
        """
        return self.encode(text, special=True) if text else np.array([self.eos], np.uint16)

    def decode(self, ids: ArrayLike) -> bytes:
        """Return the bytes of `ids`, any shape, in C order; special ids give nothing.

        Raises ValueError for an id outside the vocabulary.
        """
        flat = np.asarray(ids).ravel()
        strange = flat[(flat < 0) | (flat >= self.vocab_size)]
        if strange.size:
            raise ValueError(f"id {strange[0]} is outside the byte vocabulary of {self.vocab_size}")
        return flat[flat < _BYTES].astype(np.uint8).tobytes()

    def metadata(self) -> dict[str, object]:
        """Return the `tokenizer.ggml.*` keys of a GGUF, as NumPy values of the exact width to write."""
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
        """Return whether a GGUF's keys describe this tokenizer, by its model and tokens."""
        keys = GGUFKeys(metadata, place)
        return keys.text(TOKENIZER) == _MODEL and keys.texts(TOKENS) == cls().metadata()[TOKENS]


def _raw(data: bytes | str) -> bytes:
    return data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data


def _cut(raw: bytes) -> list[int | str]:
    """Return ids of the control tokens spelt in `raw`, and the bytes between them as one letter each."""
    return _SPELLINGS.cut(raw.decode("latin-1"))


def _ids(part: int | str) -> NDArray[np.uint16]:
    if isinstance(part, int):
        return np.array([part], np.uint16)
    return np.frombuffer(part.encode("latin-1"), np.uint8).astype(np.uint16)


AUTO, ALWAYS, NEVER = BOS = ("auto", "always", "never")


def bos_of(tokenizer: Tokenizer | None, asked: str) -> int | None:
    """Return the id that begins a text by `--bos`, None for none; without a tokenizer there is none.

    AUTO follows the tokenizer's `add_bos`. Raises UsageError for ALWAYS with a tokenizer that has no bos.
    """
    if tokenizer is None or asked == NEVER or (asked == AUTO and not tokenizer.add_bos):
        return None
    if tokenizer.bos is None:
        raise UsageError(f"--bos {asked}: the tokenizer has no bos token: use --bos {NEVER}")
    return tokenizer.bos


def with_bos(ids: NDArray[Any], bos: int | None) -> NDArray[Any]:
    """Return ids (n,) that begin with bos once: a chat template may have written it. None: as they are."""
    return ids if bos is None or ids[:1].tolist() == [bos] else np.insert(ids, 0, bos)


PARSE, PLAIN = "parse", "plain"
READINGS = (PARSE, PLAIN)
_NAMED = 3  # control tokens that a note names


class TextReader:
    """Encodes texts with their control tokens read as `asked`: PARSE, PLAIN or None (not set).

    None reads as PLAIN and counts the spelt tokens in `spelt`, for `notes`. Text by a template is read with
    PARSE. Raises UsageError for another word.
    """

    def __init__(self, tokenizer: Tokenizer, asked: str | None = None) -> None:
        if asked is not None and asked not in READINGS:
            raise UsageError(f"--control-tokens {shown(asked)}: expected one of {', '.join(READINGS)}")
        self.tokenizer, self.asked = tokenizer, asked
        self.spelt = Counter[str]()

    def anew(self) -> TextReader:
        """Return a reader with the same settings that has read nothing yet."""
        return TextReader(self.tokenizer, self.asked)

    @property
    def parses(self) -> bool:
        """Tell whether a spelling is read as the token."""
        return self.asked == PARSE

    def encode(self, texts: Sequence[bytes | str]) -> list[NDArray[np.unsignedinteger[Any]]]:
        """Return the ids (n,) of each text, uint16 or uint32, without bos and eos."""
        if self.asked is None:
            self.spelt += self.tokenizer.spelt(texts)
        return self.tokenizer.encode_batch(texts, special=self.parses)

    def notes(self) -> Iterator[str]:
        """Yield a line on the tokens spelt in the texts so far, if nobody said how to read them."""
        if self.spelt:
            found = [f"{shown(token, 60)} {count:,}" for token, count in self.spelt.most_common(_NAMED)]
            more = ", ..." if len(self.spelt) > _NAMED else ""
            yield (
                f"special tokens in the text: {self.spelt.total():,} ({', '.join(found)}{more}), read as "
                f"plain characters; --control-tokens {PARSE} reads them as tokens, --control-tokens {PLAIN} "
                "confirms plain characters"
            )
