"""A folder of token files that `zero-mpi tokenize` has made: what lies in it beside these."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zero_mpi.data.sources import sources_of
from zero_mpi.data.text_files import MANIFEST, TOKENIZER
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import is_file, is_folder

UNFINISHED = ".tokenize"  # what a job keeps there until all parts are complete


def tokenizers_of(data: Sequence[str]) -> list[Path]:
    """The tokenizers that lie in the folders of `--data`; raises UsageError for a folder not finished."""
    folders = [Path(path) for source in sources_of(data) for path in source.paths]
    for folder in folders:
        if is_folder(folder / UNFINISHED) and not is_file(folder / MANIFEST):
            raise UsageError(
                f"--data {shown(folder)}: not all of its token files are written: run zero-mpi tokenize "
                "again, with the same flags"
            )
    return [folder / TOKENIZER for folder in folders if is_file(folder / TOKENIZER)]
