"""The formats of token files, and how a file is known to be of one. A new format is a row of `FORMATS`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zero_mpi.data.arrow_tokens import arrow_layout
from zero_mpi.data.bin_tokens import is_llm_c, is_megatron, llm_c_layout, megatron_layout, nanogpt_layout
from zero_mpi.data.conversations.formats import holds_conversations
from zero_mpi.data.documents import Document
from zero_mpi.data.npy_tokens import npy_layout
from zero_mpi.data.text_files import MANIFEST, NANOGPT, TOKENIZER
from zero_mpi.data.token_file import TokenLayout, look_at
from zero_mpi.errors import JobError, UsageError
from zero_mpi.files.open import open_file

_BESIDE = frozenset({MANIFEST, TOKENIZER})  # the files of `zero-mpi tokenize`


class TokenFormat(NamedTuple):
    """A format of token files.

    known   whether a file is of it, by its name (as `collect_files` gives it) and its path
    layout  where it has its ids; ValueError or UsageError for a file that is not sound
    """

    name: str
    known: Callable[[str, Path], bool]
    layout: Callable[[Path, FileIO], TokenLayout]


def _is_arrow(name: str, path: Path) -> bool:
    return path.suffix == ".arrow" and not holds_conversations(path)


FORMATS = (
    TokenFormat("nanoGPT", lambda name, path: name.startswith(NANOGPT), nanogpt_layout),
    TokenFormat("NumPy", lambda name, path: path.suffix == ".npy", npy_layout),
    TokenFormat("Megatron", lambda name, path: path.suffix == ".bin" and is_megatron(path), megatron_layout),
    TokenFormat("llm.c", lambda name, path: path.suffix == ".bin" and is_llm_c(path), llm_c_layout),
    TokenFormat("Arrow", _is_arrow, arrow_layout),
)


def format_of(name: str, path: Path) -> TokenFormat | None:
    """The format of a file; None for one that is no token file."""
    return next((each for each in FORMATS if each.known(name, path)), None)


def token_files(files: Sequence[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """Those of the files that are token files: all, but for what lies beside them, or none.

    Raises UsageError if only some are.
    """
    tokens = [file for file in files if format_of(*file) is not None]
    chosen = {path for _, path in tokens}
    texts = [file for file in files if file[1] not in chosen and not (tokens and _is_beside(file[1], chosen))]
    if tokens and texts:
        raise UsageError(
            f"--data takes text or token files, not both: {tokens[0][1]} is one, {texts[0][1]} is not"
        )
    return tokens


def are_tokens(files: Sequence[tuple[str, Path]]) -> bool:
    """Whether files are token files, all of them; raises UsageError if only some are."""
    return bool(token_files(files))


def read_tokens(name: str, path: Path, vocab: int) -> Document:
    """A token file as one document; its ids stay in the file. Raises UsageError."""
    found = format_of(name, path)
    assert found is not None, "the caller asked whether it is one"
    try:
        with open_file(path, "a token file") as file:
            layout = found.layout(path, file)
            spans, digest = look_at(path, file, layout, vocab)
    except UsageError:
        raise
    except JobError as error:  # found before the job has begun
        raise UsageError(str(error)) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read {path} as a token file: {why}") from error
    if layout.ends is None:
        return Document(name, spans, digest)
    ends = layout.ends[np.diff(layout.ends, prepend=0) > 0]
    return Document(name, spans, hashlib.sha256(digest + ends.tobytes()).digest(), ends=ends)


def _is_beside(path: Path, tokens: set[Path]) -> bool:
    """Whether a file only describes token files."""
    if path.suffix == ".idx":
        return path.with_suffix(".bin") in tokens
    return path.name in _BESIDE
