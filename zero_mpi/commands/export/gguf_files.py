"""Writes a GGUF model as one file or several: every rank encodes and writes its share of the pieces.

The pieces do not depend on the number of ranks, so neither do the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from zero_mpi.checkpoint.gguf.header import Announced, alignment_of, checked_table, pack_file
from zero_mpi.checkpoint.gguf.index import Metadata, padded
from zero_mpi.checkpoint.gguf.reader import COUNT, PLACE, TOTAL
from zero_mpi.checkpoint.parallel_write import OutputFile
from zero_mpi.commands.export.encode import Encoder


@dataclass(frozen=True)
class PlannedFile:
    """A file to be written: its name, keys and tensors."""

    name: str
    keys: Metadata
    table: Sequence[Announced]

    def packed(self) -> tuple[bytes, dict[str, int], int]:
        """Return header, offsets and length of the file."""
        return pack_file(self.keys["general.architecture"], self.keys, self.table)


def planned(encoder: Encoder, keys: Metadata, target: Path, most: int | None) -> list[PlannedFile]:
    """Return the files of a model, in parts of at most `most` bytes of tensors, or of one tensor."""
    table, parts, filled = encoder.table(), list[list[Announced]]([[]]), 0
    for entry, spec in zip(table, checked_table(table).values(), strict=True):
        nbytes = padded(spec.nbytes, alignment_of(keys))
        if most is not None and parts[-1] and filled + nbytes > most:
            parts.append([])
            filled = 0
        parts[-1].append(entry)
        filled += nbytes
    if len(parts) == 1:
        return [PlannedFile(target.name, keys, table)]
    architecture = {"general.architecture": keys["general.architecture"]}
    found = []
    for number, part in enumerate(parts):
        places: dict[str, Any] = {PLACE: np.uint16(number), COUNT: np.uint16(len(parts))}
        own = (keys if number == 0 else architecture) | places | {TOTAL: np.int32(len(table))}
        name = f"{target.name.removesuffix('.gguf')}-{number + 1:05d}-of-{len(parts):05d}.gguf"
        found.append(PlannedFile(name, own, part))
    return found


def create(file: PlannedFile, path: Path) -> None:
    """Create a file of its full length with its header."""
    header, _, nbytes = file.packed()
    output = OutputFile(path)
    try:
        output.resize(nbytes)
        output.write_at(0, header)
    finally:
        output.close()


def fill(files: Sequence[PlannedFile], paths: Sequence[Path], encoder: Encoder, rank: int, size: int) -> None:
    """Write the pieces of this rank, every `size`-th of all files."""
    number = count()
    for file, path in zip(files, paths, strict=True):
        _, offsets, _ = file.packed()
        output = OutputFile(path, new=False)
        try:
            for name, *_ in file.table:
                for start, stop, offset in encoder.pieces(name):
                    if next(number) % size == rank:
                        output.write_at(offsets[name] + offset, encoder.encoded(name, start, stop))
        finally:
            output.close()
