"""Base class of tokenizers made from GGUF keys: tokens, their types, and special tokens in the text.

As in llama.cpp, tokens that a text spells are cut out before anything else is done, the longest first. A
control token is only recognized on request, so a document that mentions a control token stays text. A
subclass determines how the text between these tokens becomes ids.
"""

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from zero_mpi.data.encoded_cache import Batches
from zero_mpi.data.tokenizers.byte import Ids, Lengths, Tokenizer, flat_ids, raw_bytes
from zero_mpi.data.tokenizers.spellings import Spellings
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import show
from zero_mpi.files.gguf_keys import THE_FILE, TOKENS, TYPES, GGUFKeys

Parts = Sequence[int | str]  # parts of a text: ids of the tokens that it spells, and the texts between them

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # llama.cpp's token types
STANDING = (UNKNOWN, CONTROL, USER_DEFINED)  # types of tokens that are recognised in a text
KEY = "tokenizer.ggml."
PIECE = 1 << 16  # characters that are processed together
LONGEST = 1 << 10  # maximum characters of a token; tokens of known models have at most 256
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
# Tokens that end a text. They are control tokens even if the file says otherwise, as in llama.cpp.
_ENDS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"}
    | {"<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>"}
    | {"<|end_of_text|>", "<end_of_utterance>", "<turn|>", "<|tool_response>", "[e~["}
    | {"<｜end▁of▁sentence｜>"}  # noqa: RUF001 (spelt so)
)


class GGUFTokenizer(Tokenizer):
    """Base class of tokenizers made from GGUF keys.

    Raises UsageError if keys contradict each other. The key `add_eos_token` is ignored: the model shall
    continue a prompt, and in a corpus a separator follows each document.
    """

    usual_ids: ClassVar[Mapping[str, int]] = {}  # ids of special tokens if the file does not give them
    usually_adds_bos = False  # whether a prompt begins with bos if the file has no key for it
    longest: ClassVar = LONGEST
    run_batch = Batches()

    def __init__(self, metadata: Mapping[str, object], place: str = THE_FILE) -> None:
        self._metadata = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
        self._keys = GGUFKeys(self._metadata, place)
        self.tokens = _tokens(self._keys, self.longest)
        self.ids = {token: place for place, token in enumerate(self.tokens)}
        self.vocab_size = len(self.tokens)
        self.file_types = self._keys.integers(TYPES, self.vocab_size) or [NORMAL] * self.vocab_size
        pairs = zip(self.tokens, self.file_types, strict=True)
        self.types = [CONTROL if token in _ENDS else kind for token, kind in pairs]
        self.bos, self.eos = self.special_id("bos"), self.special_id("eos")
        flag = self._keys.flag(KEY + "add_bos_token")
        self.add_bos = self.usually_adds_bos if flag is None else flag
        if self.add_bos and self.bos is None:
            raise UsageError(f"{place} asks for a bos token and names none: expected {KEY}bos_token_id")
        key_ends = [self.eos, self.special_id("eot"), self.special_id("eom")]
        ends = [self.ids[token] for token in _ENDS if token in self.ids]
        self.ends = frozenset(ends + [i for i in key_ends if i is not None])

    @abstractmethod
    def ids_of_parts(self, documents: Sequence[Parts]) -> list[NDArray[np.integer[Any]]]:
        """Return the ids of each document. Ids outside the vocabulary are dropped later."""

    @abstractmethod
    def spelling(self, token: str, kind: int) -> bytes:
        """Return the bytes that a token of type `kind` has in a text; no bytes if the token is not text."""

    def lengths(self, text: str, ids: NDArray[np.integer[Any]]) -> Lengths:
        """Return the number of bytes (n,) of each of `ids` in a text that contains no special tokens."""
        widths: Lengths = self.widths[ids[ids < self.vocab_size]]
        return widths

    def encode_batch(self, documents: Sequence[bytes | str], *, special: bool = False) -> list[Ids]:
        """Return the ids of each text, as `encode` does, computed in all threads that the process may use.

        A byte that is not valid UTF-8 becomes U+FFFD.
        """
        cut = [self.cut(as_text(data), special) for data in documents]
        return [self._array(ids) for ids in self.ids_of_parts(cut)]

    def encode_with_lengths(self, documents: Sequence[bytes | str]) -> list[tuple[Ids, Lengths]]:
        cut = [(self.cut(as_text(data), True, sizes := list[int]()), sizes) for data in documents]
        rows = iter(self.ids_of_parts([[part] for parts, _ in cut for part in parts]))
        return [self._with_lengths(parts, iter(sizes), rows) for parts, sizes in cut]

    def spelt(self, documents: Sequence[bytes | str]) -> Counter[str]:
        cut = (part for data in documents for part in self.cut(as_text(data), special=True))
        ids = (part for part in cut if isinstance(part, int))
        return Counter(self.tokens[i] for i in ids if self.types[i] in (UNKNOWN, CONTROL))

    def encode_prompt(self, text: str) -> Ids:
        ids = self.encode(text, special=True).tolist()
        first = [self.bos] if self.add_bos and self.bos is not None else []
        fallback = [i for i in (self.eos, self.bos) if i is not None][:1]
        return self._array(np.array(first + ids or fallback, np.int64))

    def decode(self, ids: ArrayLike) -> bytes:
        numbers = flat_ids(ids, self.vocab_size).tolist()
        spellings = {i: self.spelling(self.tokens[i], self.types[i]) for i in set(numbers)}
        return b"".join([spellings[i] for i in numbers])

    def metadata(self) -> dict[str, object]:
        """Return the file's keys unchanged: `tokenizer.*`, and other keys that change the ids."""
        return dict(self._metadata)

    def special_id(self, name: str) -> int | None:
        """Return the id in `tokenizer.ggml.NAME_token_id`; without this key, the class's default, or None."""
        default = self.usual_ids.get(name, self.vocab_size)
        number = self._keys.token_id(name, self.vocab_size)
        return number if number is not None or default >= self.vocab_size else default

    def stripping(self) -> frozenset[str]:
        """Return the tokens after which white space in a text is dropped."""
        return frozenset()

    @cached_property
    def widths(self) -> Lengths:
        """Number of bytes (V,) of each token in a text that spells it, control tokens included."""
        pairs = zip(self.tokens, self.types, strict=True)
        return np.array([len(self.spelling(*pair)) or len(pair[0].encode()) for pair in pairs], np.int64)

    @cached_property
    def _standing(self) -> dict[bool, Spellings]:
        return {special: self.spellings(ids) for special, ids in self.ids_in_text().items()}

    def ids_in_text(self) -> dict[bool, dict[str, int]]:
        """Return tokens to find in a text, token -> id, with control tokens (True) and without (False)."""
        kinds = {True: STANDING, False: (USER_DEFINED,)}
        return {
            special: {t: place for t, place in self.ids.items() if self.types[place] in types}
            for special, types in kinds.items()
        }

    def spellings(self, ids: Mapping[str, int]) -> Spellings:
        return Spellings(ids, self.stripping())

    def cut(self, text: str, special: bool, sizes: list[int] | None = None) -> Parts:
        """Return ids of tokens that a text spells, and the texts between; append byte counts to `sizes`."""
        return self._standing[special].cut(text, sizes) if text else []

    def _with_lengths(
        self, parts: Parts, sizes: Iterator[int], ids: Iterator[NDArray[np.integer[Any]]]
    ) -> tuple[Ids, Lengths]:
        """Return the ids of all parts of a text, and for each id how many bytes of the text it covers."""
        rows: list[NDArray[np.integer[Any]]] = [np.zeros(0, np.uint32)]
        lengths = [np.zeros(0, np.int64)]
        for part, row in zip(parts, ids, strict=False):
            rows.append(row)
            lengths.append(np.array([next(sizes)]) if isinstance(part, int) else self.lengths(part, row))
        return self._array(np.concatenate(rows)), np.concatenate(lengths)

    def _array(self, ids: NDArray[np.integer[Any]]) -> Ids:
        tokens = ids[ids < self.vocab_size]
        return tokens.astype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)


def run_by(tokenizer: Tokenizer, batches: Batches) -> Tokenizer:
    """Return a copy of the tokenizer that encodes texts through `batches`."""
    clone = copy(tokenizer)
    vars(clone)["run_batch"] = batches
    return clone


def as_text(data: bytes | str) -> str:
    """Return `data` as text, in which U+FFFD replaces every byte that is not valid UTF-8."""
    raw = raw_bytes(data)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return _NOT_UTF8.sub("\ufffd", raw.decode("utf-8", "surrogateescape"))


def _tokens(keys: GGUFKeys, longest: int) -> list[str]:
    """Return the tokens in order of their ids. An empty token gets the name that llama.cpp gives to it."""
    tokens = [token or f"[EMPTY_{place}]" for place, token in enumerate(keys.texts(TOKENS) or [])]
    if not tokens:
        raise UsageError(f"{keys.place} has no {TOKENS}: expected a vocabulary")
    if len(token := max(tokens, key=len)) > longest:
        raise keys.fault(TOKENS, f"tokens of at most {longest} characters, not {len(token):,}")
    if len(set(tokens)) < len(tokens):
        repeat = show(Counter(tokens).most_common(1)[0][0])
        raise UsageError(f"{keys.place}: {TOKENS}: expected each token once, found {repeat} again")
    return tokens
