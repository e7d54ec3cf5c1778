"""The tokens that end an answer of an exported model: readers stop at those that its files name.

llama.cpp also stops at some tokens by their text. Transformers and vLLM stop at listed numbers alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zero_mpi.checkpoint.gguf.index import Metadata
from zero_mpi.data import KINDS
from zero_mpi.data.conversations.chat_template import template_of
from zero_mpi.data.tokenizers.gguf_tokenizer import CONTROL, USER_DEFINED, GGUFTokenizer
from zero_mpi.errors import UsageError
from zero_mpi.files.gguf_keys import GGUFKeys

ANSWER = "the 17th answer"
MESSAGES = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": ANSWER}]
EOS, EOT, EOM = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


def ends_of(metadata: Metadata, place: str) -> list[int]:
    """Return the tokens that end an answer, eos first; empty where the keys name none."""
    tokenizer = tokenizer_of(metadata | turn_keys(metadata, place), place)
    eos = tokenizer.eos if tokenizer else GGUFKeys(metadata, place).whole(EOS)
    first = [] if eos is None else [eos]
    return first + sorted(tokenizer.ends - set(first) if tokenizer else ())


def turn_keys(metadata: Metadata, place: str) -> dict[str, Any]:
    """Return the key of the token by which the chat template ends an answer, where that is not eos.

    Another token that has this key becomes the end of a message, which llama.cpp stops at as well.
    """
    tokenizer = tokenizer_of(metadata, place)
    end = turn_end(tokenizer) if tokenizer else None
    if tokenizer is None or end in (None, tokenizer.eos, metadata.get(EOT)):
        return {}
    return {EOT: np.uint32(end)} | ({EOM: metadata[EOT]} if EOT in metadata and EOM not in metadata else {})


def turn_end(tokenizer: GGUFTokenizer) -> int | None:
    """Return the token by which the chat template ends an answer; None if it does not end one by a token."""
    try:
        text = template_of(tokenizer).render(MESSAGES).text
    except (UsageError, ValueError):  # there is none, or it refuses such a conversation
        return None
    kinds, behind = (CONTROL, USER_DEFINED), text.rpartition(ANSWER)[2].lstrip()
    found = [token for token in tokenizer.tokens if behind.startswith(token)]
    ids = [tokenizer.ids[token] for token in sorted(found, key=len)]
    return next((token for token in reversed(ids) if tokenizer.types[token] in kinds), None)


def tokenizer_of(metadata: Metadata, place: str) -> GGUFTokenizer | None:
    """Return the tokenizer of a model's keys; None for one that is not of a known kind."""
    kind = KINDS.get(GGUFKeys(metadata, place).tokenizer or "")
    try:
        return kind(metadata, place) if kind else None
    except UsageError:  # a model may be exported without it
        return None
