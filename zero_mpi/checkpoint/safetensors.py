"""The safetensors format: 8 bytes with the length of the header, a JSON header, and then the tensors.

The file is untrusted input. The header's length is limited; every dtype, shape and offset is compared with
the file's size; and tensors must fill the data without gap or overlap, as the format requires. A model is one
file, or several files with an index that names the file of each tensor.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from gguf.constants import GGMLQuantizationType

from zero_mpi.checkpoint.tensor_file import Floats, Readable, StoredFile, TensorSpec
from zero_mpi.errors import FileError
from zero_mpi.files.foreign import show
from zero_mpi.files.open import open_file, read_file
from zero_mpi.files.parse import parse_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER = 32 << 20  # maximum bytes of a header, thousands of times the usual; limits time and memory
MAX_VALUES = 1 << 20  # maximum number of values in a header or an index: enough for 100,000 tensors
MAX_DIMS = 64  # NumPy's own limit
METADATA = "__metadata__"
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
WEIGHTS = {name: GGMLQuantizationType[name] for name in ("F32", "F16", "BF16")}


@dataclass(frozen=True)
class Entry:
    """One tensor: dtype as the format writes it, shape, and position in the file in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    part: int = 0


@dataclass(frozen=True)
class SafetensorsModel(Readable):
    """Index of one or several files; data is read on demand, and no file stays open."""

    parts: tuple[StoredFile, ...]
    tensors: dict[str, Entry]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> SafetensorsModel:
        """Read and check the header of a file, but no data. Raise UsageError if the header is invalid."""
        with open_file(path, "a safetensors file") as file:
            part = StoredFile(Path(os.fsdecode(file.name)), os.fstat(file.fileno()).st_size)
            first = bytes(part.take(file, 0, min(8, part.nbytes)))
            length, most = int.from_bytes(first, "little"), min(MAX_HEADER, part.nbytes - 8)
            if len(first) < 8 or not 2 <= length <= most:
                text = f"{length}" if len(first) == 8 else f"a file of {len(first)} bytes"
                expected = f"expected a safetensors file with a header of 2 to {max(most, 2)} bytes"
                raise FileError(f"{part.path}: {expected}, found {text}")
            raw = bytes(part.take(file, 8, length))
        if raw[:1] != b"{":
            raise FileError(f"{part.path}: expected a header that starts with {{, found {raw[:1]!r}")
        header = json_object(part.path, raw)
        fields = header.pop(METADATA, {})
        if not isinstance(fields, dict) or not all(isinstance(value, str) for value in fields.values()):
            text = show(str(fields))
            raise FileError(f"{part.path}: {METADATA}: expected names and texts, found {text}")
        start = 8 + length
        entries = {name: _entry(part.path, name, fields, start) for name, fields in header.items()}
        _check_layout(part, entries, start)
        return cls((part,), entries)

    @classmethod
    def open_folder(cls, folder: str | os.PathLike[str]) -> SafetensorsModel:
        """Open model.safetensors in a folder, or the files that model.safetensors.index.json names."""
        folder = Path(folder)
        if (folder / SINGLE).exists() or not (folder / INDEX).exists():
            return cls.open(folder / SINGLE)
        files = _weight_map(folder / INDEX)
        expected: dict[str, set[str]] = {name: set() for name in sorted(set(files.values()))}
        for tensor, name in files.items():
            expected[name].add(tensor)
        models = [cls.open(folder / name) for name in expected]
        entries: dict[str, Entry] = {}
        for number, (name, model) in enumerate(zip(expected, models, strict=True)):
            actual = set(model.tensors)
            for verb, names in (("lacks", expected[name] - actual), ("has", actual - expected[name])):
                if names:
                    raise FileError(f"{folder / name}: {verb} {show(min(names))}, which contradicts {INDEX}")
            entries |= {key: replace(entry, part=number) for key, entry in model.tensors.items()}
        return cls(tuple(model.parts[0] for model in models), entries)

    def fill(self, spec: TensorSpec, start: int, out: Floats) -> None:
        entry = self.tensors[spec.name]
        self.parts[entry.part].values(entry.offset, spec, start, out)

    def spec(self, name: str) -> TensorSpec:
        """Return shape and type of a tensor. Raise FileError for any dtype except F32, F16 and BF16.

        F64 is refused too, because float32 cannot hold all of its numbers.
        """
        entry = self.tensors[name]
        if entry.dtype not in WEIGHTS:
            fault = f"expected F32, F16 or BF16, found {entry.dtype}"
            raise FileError(f"{self.parts[entry.part].path}: tensor {show(name)}: {fault}: convert it first")
        return TensorSpec(name, entry.shape, WEIGHTS[entry.dtype])

    def raw_chunks(self, name: str, size: int) -> Iterator[memoryview]:
        """Yield the stored bytes of a tensor in chunks of `size` bytes; the last chunk may be shorter."""
        entry = self.tensors[name]
        return self.parts[entry.part].chunks(entry.offset, entry.nbytes, size)


def json_object(path: Path, raw: bytes) -> dict[str, Any]:
    """Return the JSON object in `raw`. Raise FileError for another value, repeated names or invalid UTF-8."""
    try:
        value = parse_json(raw, unique=True, most_values=MAX_VALUES)
    except ValueError as error:
        raise FileError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise FileError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _entry(path: Path, name: str, fields: Any, start: int) -> Entry:
    """Return an entry of the header. Raise FileError if its values are invalid or do not fit together."""

    def fault(problem: str) -> FileError:
        return FileError(f"{path}: tensor {show(name)}: {problem}")

    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise fault("expected dtype, shape and data_offsets")
    if any("\ud800" <= letter <= "\udfff" for letter in name):  # JSON text may contain lone surrogates
        raise fault("expected a name that UTF-8 can hold")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise fault(f"expected a known dtype, found {show(str(dtype))}")
    if not _are_counts(shape):
        raise fault(f"expected a shape of whole numbers, found {show(str(shape))}")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise fault(f"expected two data_offsets, found {show(str(offsets))}")
    bits = prod(shape) * BITS[dtype]
    if bits % 8 or offsets[1] - offsets[0] != bits // 8:
        actual = f"found {offsets[1] - offsets[0]}"
        raise fault(f"expected {bits / 8:g} bytes for {dtype} {show(str(shape))}, {actual}")
    return Entry(name, dtype, tuple(shape), start + offsets[0], bits // 8)


def _are_counts(values: Any) -> bool:
    if not isinstance(values, list) or len(values) > MAX_DIMS:
        return False
    return all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _check_layout(file: StoredFile, entries: Mapping[str, Entry], start: int) -> None:
    """Raise FileError unless tensors follow each other without gap or overlap up to the end of the file."""
    end = start
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset != end:
            problem = f"expected its data at byte {end}, found {entry.offset}"
            raise FileError(f"{file.path}: tensor {show(entry.name)}: {problem}: a gap or an overlap")
        end += entry.nbytes
    if end != file.nbytes:
        raise FileError(f"{file.path}: expected a file of {end} bytes, found {file.nbytes}")


def _weight_map(path: Path) -> dict[str, str]:
    """Return tensor -> name of its file, read from an index. The files must be in the index's folder."""
    files = json_object(path, read_file(path, MAX_HEADER, "an index")).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise FileError(f"{path}: expected a weight_map from tensors to files")
    for name in files.values():
        if not isinstance(name, str) or os.path.basename(name) != name or not name.endswith(".safetensors"):
            raise FileError(f"{path}: weight_map: expected NAME.safetensors, found {show(str(name))}")
    return files


def pack_header(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Return the first bytes of a file, length and header, for tensors given as (name, dtype, shape)."""
    header: dict[str, Any] = {METADATA: {"format": "pt"}}  # transformers requires this key
    end = 0
    for name, dtype, shape in tensors:
        place = [end, end := end + prod(shape) * BITS[dtype] // 8]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": place}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
