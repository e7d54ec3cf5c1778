"""Writes a GGUF model as one or more files. Every rank encodes and writes its share of the chunks.

The chunks do not depend on the number of ranks, so the bytes of the files do not either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize

from zero_mpi.checkpoint.gguf.header import TableRow, alignment_of, checked_table, pack_file
from zero_mpi.checkpoint.gguf.index import Metadata, padded
from zero_mpi.checkpoint.gguf.reader import COUNT, PLACE, TOTAL, GGUFFile
from zero_mpi.checkpoint.mixes import FLOATS
from zero_mpi.checkpoint.parallel_write import OutputFile
from zero_mpi.checkpoint.tensor_file import NATIVE, Floats
from zero_mpi.checkpoint.weights import WeightSource, gguf_of
from zero_mpi.errors import FileError
from zero_mpi.files.foreign import show
from zero_mpi.ops import ggml
from zero_mpi.ops.block_kinds import SCALES, finite_blocks

T = TypeVar("T")


@dataclass(frozen=True)
class PlannedFile:
    """A file to write: its name, keys and tensors."""

    name: str
    keys: Metadata
    table: Sequence[TableRow]

    def packed(self) -> tuple[bytes, dict[str, int], int]:
        return pack_file(self.keys["general.architecture"], self.keys, self.table)


def plan_files(encoder: Encoder, keys: Metadata, target: Path, most: int | None) -> list[PlannedFile]:
    """Return the files to write. A file has at most `most` bytes of tensors, unless one tensor is larger."""
    table, alignment = encoder.table(), alignment_of(keys)
    sizes = [padded(spec.nbytes, alignment) for spec in checked_table(table).values()]
    parts = [table] if most is None else in_parts(table, sizes, most)
    if len(parts) == 1:
        return [PlannedFile(target.name, keys, table)]
    architecture = {"general.architecture": keys["general.architecture"]}
    files = []
    for number, part in enumerate(parts):
        places: dict[str, Any] = {PLACE: np.uint16(number), COUNT: np.uint16(len(parts))}
        metadata = (keys if number == 0 else architecture) | places | {TOTAL: np.int32(len(table))}
        name = f"{target.name.removesuffix('.gguf')}-{number + 1:05d}-of-{len(parts):05d}.gguf"
        files.append(PlannedFile(name, metadata, part))
    return files


def in_parts(items: Iterable[T], sizes: Iterable[int], most: int) -> list[list[T]]:
    """Split items into lists, in order. A list has a total size of at most `most`, or a single item."""
    parts, filled = list[list[T]]([[]]), 0
    for item, size in zip(items, sizes, strict=True):
        if parts[-1] and filled + size > most:
            parts.append([])
            filled = 0
        parts[-1].append(item)
        filled += size
    return parts


def create(file: PlannedFile, path: Path) -> None:
    """Create a file of the full length and write its header."""
    header, _, nbytes = file.packed()
    with closing(OutputFile(path)) as output:
        output.resize(nbytes)
        output.write_at(0, header)


def fill(files: Sequence[PlannedFile], paths: Sequence[Path], encoder: Encoder, rank: int, size: int) -> None:
    """Write the chunks of this rank: every `size`-th chunk, counted over all files."""
    number = count()
    for file, path in zip(files, paths, strict=True):
        _, offsets, _ = file.packed()
        chunks = ((name, *chunk) for name, *_ in file.table for chunk in encoder.pieces(name))
        with closing(OutputFile(path, new=False)) as output:
            for name, start, stop, offset in chunks:
                if next(number) % size == rank:
                    output.write_at(offsets[name] + offset, encoder.encode(name, start, stop))


AT_ONCE = 1 << 18  # elements encoded together; this takes a few MiB with all temporaries


@dataclass(frozen=True)
class Encoder:
    """Encoder of a source's tensors. It converts each tensor to its type in `kinds`, in chunks.

    by_ggml      whether the library ggml quantizes; else the Python package gguf does (q8_0, q4_0, ...)
    importance   tensor name -> weights of its columns, (matrices, width)
    masters      training state whose float32 masters of rounded parameters are encoded instead
    """

    source: WeightSource
    kinds: dict[str, GGMLQuantizationType]
    by_ggml: bool = False
    importance: dict[str, Floats] = field(default_factory=dict)
    masters: GGUFFile | None = None

    def table(self) -> list[tuple[str, tuple[int, ...], GGMLQuantizationType]]:
        return [(name, spec.shape, self.kinds[name]) for name, spec in self.source.tensors.items()]

    def pieces(self, name: str) -> list[tuple[int, int, int]]:
        """Return the chunks of a tensor: first element, end element, first byte in the tensor's data."""
        spec, kind = self.source.tensors[name], self.kinds[name]
        block, nbytes = GGML_QUANT_SIZES[kind]
        width, matrix = spec.shape[-1], spec.size // (spec.shape[0] if len(spec.shape) > 2 else 1)
        step = max(1, AT_ONCE // width) * width if kind not in FLOATS else AT_ONCE
        return [
            (first, min(first + step, start + matrix), first // block * nbytes)
            for start in range(0, spec.size, matrix)
            for first in range(start, start + matrix, step)
        ]

    def encode(self, name: str, start: int, stop: int) -> memoryview:
        """Return elements [start, stop) in their new type. A GGUF tensor that has this type is copied."""
        spec, kind = self.source.tensors[name], self.kinds[name]
        block, nbytes = GGML_QUANT_SIZES[kind]
        file = gguf_of(self.source, name)
        if file is not None and spec.type == kind:
            raw = np.empty((stop - start) // block * nbytes, np.uint8)
            file.read_bytes(name, start // block * nbytes, raw)
            return raw.data
        label, master = f"{self.source.path}: tensor {show(name)}", f"optimizer.master.{name}"
        if self.masters is not None and master in self.masters.tensors:
            values = self.masters.read(master, start, stop)
        else:
            values = self.source.read(name, start, stop)
        if kind in FLOATS or not self.by_ggml:
            return next(encoded_pieces(label, [values], kind))
        check_finite(label, values)
        weights = self.importance.get(name)
        if weights is not None:
            weights = weights[start // (spec.size // len(weights))]
        try:
            return ggml.quantize(values.reshape(-1, spec.shape[-1]), kind, weights).reshape(-1).data
        except OverflowError:
            raise too_large(label, values, kind) from None


def check_finite(label: str, values: Floats) -> None:
    if not np.isfinite(values).all():
        raise FileError(f"{label}: expected finite numbers, found infinity or NaN")


def too_large(label: str, values: Floats, kind: GGMLQuantizationType) -> FileError:
    types = "f32" if kind.name == "BF16" else "bf16 or f32"
    return FileError(f"{label}: {np.abs(values).max():g} is more than {kind.name} can hold: use {types}")


def encoded_pieces(label: str, chunks: Iterable[Floats], kind: GGMLQuantizationType) -> Iterator[memoryview]:
    """Yield values as encoded blocks. Raise FileError for values that are not finite or too large."""
    for chunk in chunks:
        check_finite(label, chunk)
        for start in range(0, max(chunk.size, 1), AT_ONCE):
            with np.errstate(all="ignore"):  # 1 / scale overflows for tiny values, whose blocks decode to 0
                blocks = quantize(chunk[None, start : start + AT_ONCE], kind)
            packed = kind.name in SCALES
            finite = finite_blocks(blocks, kind.name) if packed else np.isfinite(blocks.view(NATIVE[kind]))
            if not finite.all():
                raise too_large(label, chunk, kind)
            yield blocks.data
