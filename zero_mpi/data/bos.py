"""The bos token in front of a text: where the model asks for one, or where the user does (`--bos`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zero_mpi.data.tokenizers.byte import Tokenizer
from zero_mpi.errors import UsageError

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
