"""Reading of control tokens that are spelt in text, such as <|im_start|>: as characters or as the token.

An author who writes about models means the characters. Text by strangers should be read so too: a token in
it could end a turn. An author who writes a conversation by a template means the token. The text itself does
not show which is meant, so a flag decides. Without a setting the characters are taken, and the user gets a
note.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zero_mpi.data.tokenizers.byte import Tokenizer
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import shown

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
