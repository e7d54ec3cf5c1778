"""Sources that `--data` names: each with its paths and its share of the samples."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from zero_mpi.data.loader import Batch, WindowSource, inside
from zero_mpi.data.sample_order import Places
from zero_mpi.data.text_files import MANIFEST, TOKENIZER, collect_files
from zero_mpi.data.token_formats import are_tokens
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import is_file, is_folder

LEAST_SHARE = 1e-3  # smallest share of all samples: a block of `sample_order` has some of each source
_SHARE = re.compile(r"(?P<path>.+)=(?P<share>[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)", re.DOTALL)


class DataSource(NamedTuple):
    """Source in `--data`: paths that are read as one, and their share of all samples."""

    name: str
    paths: list[str]
    share: float = 1.0


def sources_of(given: Sequence[str]) -> list[DataSource]:
    """Return the sources of `--data`: one for each `PATH=SHARE`, or one for all paths.

    A name that exists as a path is taken as the path. Shares are relative to their sum. Raises UsageError for
    some paths with a share and some without, for a repeated path, and for a share below `LEAST_SHARE`.
    """
    found = [None if os.path.exists(path) else _SHARE.fullmatch(path) for path in given]
    shares = {match["path"]: float(match["share"]) for match in found if match is not None}
    if not shares:
        return [DataSource("", list(given))]
    if len(shares) != len(given):
        missing = next((path for path, match in zip(given, found, strict=True) if match is None), "")
        what = f"{shown(missing)} has none" if missing else "a path comes twice"
        raise UsageError(f"--data: expected PATH=SHARE for each path or for none; {what}")
    total = sum(shares.values())
    for path, share in shares.items():
        if not 0 < share >= LEAST_SHARE * total or not total < np.inf:
            raise UsageError(
                f"--data {shown(path)}={share:g}: expected a share of at least {LEAST_SHARE:g} of all, "
                f"{total:g}"
            )
    names = unique([Path(path).name or path for path in shares])
    return [
        DataSource(name, [path], share / total)
        for name, (path, share) in zip(names, shares.items(), strict=True)
    ]


def unique(names: Sequence[str]) -> list[str]:
    """Return unique names: a repeated NAME becomes NAME-2."""
    return [
        name if (before := list(names[:place]).count(name)) == 0 else f"{name}-{before + 1}"
        for place, name in enumerate(names)
    ]


def files_of(data: Sequence[str]) -> list[tuple[str, Path]]:
    """Return (name, path) of every file of all sources, as `collect_files` does."""
    return [file for source in sources_of(data) for file in collect_files(source.paths)]


def holds_token_files(data: Sequence[str]) -> bool:
    """Return whether all sources are token files, which need no tokenizer; UsageError if only some are."""
    kinds = [are_tokens(collect_files(source.paths)) for source in sources_of(data)]  # all are checked
    return all(kinds)


class MixedWindows:
    """Windows of several sources with one context, in one numbering: those of the first source come first."""

    kind = "window"

    def __init__(self, parts: Sequence[WindowSource]) -> None:
        self.parts, self.context = parts, parts[0].context
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _by_part(self, indices: ArrayLike) -> list[tuple[WindowSource, Places, Places]]:
        """Return (part, rows of these indices in it, its own numbers of them) for parts that have any."""
        wanted = inside(indices, len(self))
        of = np.searchsorted(self._ends, wanted, "right")
        rows = [np.flatnonzero(of == number) for number in range(len(self.parts))]
        begins = self._ends - [len(part) for part in self.parts]
        return [
            (part, here, wanted[here] - begins[number])
            for number, (part, here) in enumerate(zip(self.parts, rows, strict=True))
            if here.size
        ]

    def counted(self, indices: ArrayLike) -> int:
        return sum(part.counted(numbers) for part, _, numbers in self._by_part(indices))

    def batch(self, indices: ArrayLike) -> Batch:
        """Return the windows `indices` (b,); a row of running text is one document if others hold several."""
        cut = [(rows, part.batch(numbers)) for part, rows, numbers in self._by_part(indices)]
        if len(cut) == 1:
            return cut[0][1]
        shape = (np.size(indices), self.context)
        inputs, targets = np.empty(shape, np.int64), np.empty(shape, np.int64)
        packed = any(batch.begins is not None for _, batch in cut)
        begins = np.zeros(shape, np.int64) if packed else None
        for rows, batch in cut:
            inputs[rows], targets[rows] = batch.inputs, batch.targets
            if begins is not None and batch.begins is not None:
                begins[rows] = batch.begins
        return Batch(inputs, targets, begins)

    def about(self) -> str:
        return "; ".join(filter(None, (part.about() for part in self.parts)))

    def notes(self) -> list[str]:
        return [note for part in self.parts for note in part.notes()]


UNFINISHED = ".tokenize"  # folder of a job's files until all parts are complete


def tokenizers_of(data: Sequence[str]) -> list[Path]:
    """Return the tokenizers in the folders of `--data`; raises UsageError for an unfinished folder."""
    folders = [Path(path) for source in sources_of(data) for path in source.paths]
    for folder in folders:
        if is_folder(folder / UNFINISHED) and not is_file(folder / MANIFEST):
            raise UsageError(
                f"--data {shown(folder)}: its token files are incomplete: run zero-mpi tokenize again, with "
                "the same flags"
            )
    return [folder / TOKENIZER for folder in folders if is_file(folder / TOKENIZER)]
