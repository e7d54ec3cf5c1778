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
EOT, EOM = "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"


def ends_of(metadata: Metadata, place: str) -> tuple[list[int], dict[str, Any]]:
    """Return the tokens that end an answer, eos first, and the key of one that the chat template alone tells.

    Of a tokenizer that is not known here there are none.
    """
    kind = KINDS.get(GGUFKeys(metadata, place).tokenizer or "")
    try:
        tokenizer = kind(metadata, place) if kind else None
    except UsageError:  # a model may be exported without it
        tokenizer = None
    if tokenizer is None:
        return [], {}
    end, first = turn_end(tokenizer), [] if tokenizer.eos is None else [tokenizer.eos]
    ends = first + sorted((tokenizer.ends if end is None else tokenizer.ends | {end}) - set(first))
    if end in (None, tokenizer.eos) or (EOT in metadata and end in tokenizer.ends):
        return ends, {}
    return ends, {EOM if EOT in metadata else EOT: np.uint32(end)}


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
