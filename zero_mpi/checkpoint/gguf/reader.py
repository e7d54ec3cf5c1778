"""Reader of GGUF models. It reads the index, and only those bytes of the data that are requested.

A model may be split into files NAME-00001-of-0000N.gguf. The first file holds the keys, and each file has a
table of its own tensors. Opening the first file opens all of them as one model, which hides the split.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zero_mpi.checkpoint.gguf.index import (
    ALIGNMENT_KEY,
    DEFAULT_ALIGNMENT,
    GGUFError,
    Index,
    Metadata,
    TensorInfo,
    padded,
    read_index,
)
from zero_mpi.checkpoint.tensor_file import StoredFile, WeightSource
from zero_mpi.files.foreign import show
from zero_mpi.files.gguf_keys import GGUFKeys
from zero_mpi.files.open import open_file

SPLIT = "split."
PLACE, COUNT, TOTAL = "split.no", "split.count", "split.tensors.count"
PART_NAME = re.compile(r"(.*)-(\d{5,})-of-(\d{5,})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class GGUFFile(WeightSource):
    """Index of a GGUF model; data is read on demand. `path`: the file, or the first of several files.

    It keeps no file open, so it can be sent to other processes that see the same path. `tensors` has the
    tensors of all files in order. `metadata` has no `split.*` keys, because they describe the files and not
    the model; `split` has them. Links in the path are resolved, so an index that was opened through a link to
    the newest checkpoint never reads the data of a later checkpoint.
    """

    path: Path
    parts: tuple[StoredFile, ...]
    metadata: Metadata
    tensors: dict[str, TensorInfo]
    split: Metadata

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GGUFFile:
        """Read and check the index of a model, but no data. Raise UsageError if the index is invalid.

        If the model is split, `path` must be its first file. All other files must exist and match.
        """
        first = _read_part(path)
        parts = [first, *_other_parts(path, first)]
        tensors: dict[str, TensorInfo] = {}
        for number, part in enumerate(parts):
            for name, info in part.tensors.items():
                if name in tensors:
                    problem = f"expected once, found in part {tensors[name].part + 1} too"
                    raise part.fault(f"tensor {show(name)}: {problem}")
                tensors[name] = replace(info, part=number)
        for part in parts if len(parts) > 1 else ():
            if part is first or TOTAL in part.metadata:
                part.expect(TOTAL, np.int32, len(tensors), "the tensors in all parts")
        metadata = {key: value for key, value in first.metadata.items() if not key.startswith(SPLIT)}
        split = {key: value for key, value in first.metadata.items() if key.startswith(SPLIT)}
        return cls(first.file.path, tuple(part.file for part in parts), metadata, tensors, split)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def surplus(self) -> int:
        """Number of bytes after the last tensor, summed over all files. Some programs write such bytes."""
        alignment = int(self.metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT))
        ends = {info.part: info.offset + info.nbytes for info in self.tensors.values()}  # end of each part
        return sum(max(0, self.parts[part].nbytes - padded(end, alignment)) for part, end in ends.items())

    def read_bytes(self, name: str, start: int, out: npt.NDArray[np.uint8]) -> None:
        """Fill out (n,) with stored bytes [start, start + n) of a tensor. Raise UsageError as `read` does."""
        info = self.spec(name)
        assert 0 <= start <= start + out.size <= info.nbytes, "expected a range inside the tensor"
        self.parts[info.part].bytes_at(info.offset + start, out)

    def raw_chunks(self, name: str, size: int) -> Iterator[memoryview]:
        """Yield the stored bytes of a tensor in chunks of `size` bytes; the last chunk may be shorter."""
        info = self.spec(name)
        return self.parts[info.part].chunks(info.offset, info.nbytes, size)

    def spec(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise GGUFError(f"{self.path}: the file has no tensor {show(name)}")
        return self.tensors[name]

    def fill(self, spec: TensorInfo, start: int, out: npt.NDArray[np.float32]) -> None:
        self.parts[spec.part].values(spec.offset, spec, start, out)


@dataclass(frozen=True)
class _Part:
    """One file: a complete model, or a part of a split model."""

    file: StoredFile
    metadata: Metadata
    tensors: dict[str, TensorInfo]

    def fault(self, problem: str) -> GGUFError:
        return GGUFError(f"{self.file.path}: {problem}")

    def split_number(self, key: str, kind: type[np.integer[Any]], default: int | None = None) -> int:
        """Return the value of a `split.*` key. Its type must be exactly the type that llama.cpp requires."""
        value: Any = self.metadata.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, kind) or value < 0:
            actual = "nothing" if value is None else show(f"{type(value).__name__} {value}")
            raise self.fault(f"key {key}: expected {kind.__name__.upper()} of 0 or more, found {actual}")
        return int(value)

    def expect(self, key: str, kind: type[np.integer[Any]], expected: int, meaning: str) -> None:
        if (number := self.split_number(key, kind)) != expected:
            raise self.fault(f"key {key}: expected {expected}, {meaning}, found {number}")


def _read_part(path: str | os.PathLike[str]) -> _Part:
    if os.path.isdir(path) and os.path.isfile(model := os.path.join(path, "model.gguf")):
        raise GGUFError(f"{path}: expected a GGUF file, found a folder: use the file in it, {model}")
    with open_file(path, "a GGUF file") as raw, io.BufferedReader(raw, 1 << 16) as reader:
        file = StoredFile(Path(os.fsdecode(raw.name)), os.fstat(raw.fileno()).st_size)
        if file.nbytes == 0:
            raise GGUFError(f"{file.path}: expected a GGUF file, found an empty one")
        return _Part(file, *read_index(Index(reader, file.path, file.nbytes)))


def _other_parts(path: str | os.PathLike[str], first: _Part) -> Iterator[_Part]:
    """Yield the later files of a split model, each checked against the first; none if the model is not split.

    If the number of parts is 0 or 1, the model is not split: llama.cpp's tools keep the `split.*` keys when
    they merge all parts into one file. A later part has its part number, but no keys of the model.
    """
    count, place = first.split_number(COUNT, np.uint16, 0), first.split_number(PLACE, np.uint16, 0)
    if count <= 1 and place == 0:
        return
    match = PART_NAME.fullmatch(os.path.abspath(path)) or PART_NAME.fullmatch(str(first.file.path))
    if match is None or int(match[2]) != place + 1 or int(match[3]) != count:
        ending = f"-{place + 1:05d}-of-{count:05d}.gguf"
        raise first.fault(f"part {place + 1} of {count} of a model: expected a name that ends in {ending}")
    paths = [f"{match[1]}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    if place != 0:
        raise first.fault(f"this is part {place + 1} of {count} of a model: use the first part, {paths[0]}")
    arch = GGUFKeys(first.metadata, str(first.file.path)).architecture
    for number, name in enumerate(paths[1:], 1):
        part = _read_part(name)
        for key, expected in ((PLACE, number), (COUNT, count)):
            part.expect(key, np.uint16, expected, f"as part {number + 1} of {count}")
        surplus = next((key for key in part.metadata if not key.startswith((SPLIT, "general."))), None)
        if surplus is not None:
            raise part.fault(f"key {show(surplus)}: expected only split.* and general.* keys in a later part")
        if GGUFKeys(part.metadata, str(part.file.path)).architecture not in (None, arch):
            raise part.fault(f"expected architecture {show(arch or '')}, as in the first part, found another")
        yield part
