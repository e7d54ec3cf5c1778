"""New tokens for a model's tokenizer (`--add-tokens FILE`), stored as user-defined tokens in its GGUF keys.

As in llama.cpp, these tokens are cut out of a text before anything else is done with it. They first replace
unused `[PADn]` at the end of the vocabulary; further tokens extend the vocabulary.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zero_mpi.data import tokenizer_from_metadata
from zero_mpi.data.tokenizers.gguf_tokenizer import KEY, NORMAL, UNUSED, USER_DEFINED
from zero_mpi.errors import UsageError, prefixed
from zero_mpi.files.foreign import show, shown
from zero_mpi.files.gguf_keys import ARCHITECTURE, THE_FILE, TOKENS, TYPES, GGUFKeys
from zero_mpi.files.open import read_file
from zero_mpi.files.parse import parse_json
from zero_mpi.files.text_streams import is_text

MOST_BYTES, MOST_TOKENS, LONGEST = 1 << 22, 1 << 16, 256  # limits: bytes and tokens of a file, token length
SCORES = KEY + "scores"
LEAST_LIKELY = -1000.0  # score of a token that is cut out of a text before scores are used, as in llama.cpp


def read_tokens(path: str | Path) -> list[str]:
    """Return the tokens in a file: a JSON list, or one per line. Raise UsageError if a token is invalid."""
    place = f"--add-tokens {shown(path)}"
    with prefixed(f"{place}:"):
        raw = read_file(path, MOST_BYTES, "a file of tokens")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{place}: expected UTF-8, found other bytes") from None
    try:
        tokens = parse_json(text)
    except ValueError:
        tokens = None
    if not isinstance(tokens, list):
        tokens = [line.strip() for line in text.splitlines() if line.strip()]
    wrong = next((t for t in tokens if not is_token(t)), None) if tokens else "no token"
    if wrong is not None or len(tokens) > MOST_TOKENS:
        problem = f"{len(tokens):,} tokens" if wrong is None else shown(wrong, 40)
        raise UsageError(
            f"{place}: expected 1 to {MOST_TOKENS:,} tokens of 1 to {LONGEST} characters, found {problem}"
        )
    token, count = Counter(tokens).most_common(1)[0]
    if count > 1:
        raise UsageError(f"{place}: expected each token once, found {show(token)} {count} times")
    return list(tokens)


def is_token(text: Any) -> bool:
    """Return whether a value can be a token: 1 to LONGEST characters that UTF-8 can encode, without NUL."""
    return is_text(text) and 0 < len(text) <= LONGEST and "\0" not in text


def with_tokens(
    metadata: Mapping[str, Any], tokens: Sequence[str], place: str = THE_FILE
) -> tuple[dict[str, Any], int]:
    """Return a model's keys with new tokens, and the first new id. Raise UsageError for a known token."""
    keys, tokenizer = GGUFKeys(metadata, place), tokenizer_from_metadata(metadata, place)
    vocabulary = keys.texts(TOKENS) or []
    repeats = [t for t in tokens if t in vocabulary or len(tokenizer.encode(t, special=True)) == 1]
    if repeats:
        names = ", ".join(show(token) for token in repeats[:3])
        raise UsageError(f"--add-tokens: {place} has {names} already: leave out {len(repeats)} of the tokens")
    size, count = len(vocabulary), len(tokens)
    types = keys.integers(TYPES, size) or [NORMAL] * size
    first = size
    while first and types[first - 1] == UNUSED and vocabulary[first - 1] == f"[PAD{first - 1}]":
        first -= 1
    grown: dict[str, Any] = {**metadata, TOKENS: [*vocabulary[:first], *tokens, *vocabulary[first + count :]]}
    types[first : first + count] = [USER_DEFINED] * count
    grown[TYPES] = np.array(types, np.int32)
    scores = keys.numbers(SCORES, size)
    if scores is not None:
        rest = scores[first + count :]
        grown[SCORES] = np.concatenate((scores[:first], np.full(count, LEAST_LIKELY, np.float32), rest))
    key = f"{keys.text(ARCHITECTURE)}.vocab_size"
    return grown | ({key: np.uint32(len(types))} if key in metadata else {}), first
