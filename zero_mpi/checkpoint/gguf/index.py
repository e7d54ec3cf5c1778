"""Strict reader of the index of a GGUF file: its header, keys and tensor table.

A GGUF file is untrusted input. The index is read once, from start to end. Counts and lengths are compared
with limits or the remaining bytes before memory is allocated or a loop begins. Sizes cannot overflow.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from zero_mpi.checkpoint.tensor_file import Metadata as Metadata
from zero_mpi.checkpoint.tensor_file import TensorSpec
from zero_mpi.errors import FileError
from zero_mpi.files.foreign import show

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # equal layouts; version 3 also allows big-endian files, which we and llama.cpp refuse
CHECKPOINT_ID = "training.checkpoint_id"
ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32
MAX_KEY_BYTES = 65535  # the format's limit
MAX_NAME_BYTES = 63  # llama.cpp's limit
MAX_DIMS = 4
MAX_INDEX_BYTES = 128 << 20  # six times the largest known index; limits time and memory for a damaged file
# Several times the largest known counts. A key or tensor takes about 500 bytes of memory, a string about 60.
MAX_KEYS, MAX_TENSORS, MAX_ITEMS = 1 << 19, 1 << 15, 1 << 21
BLOCK = 1 << 18  # number of bytes of strings that are read at once

_NUMBERS = "UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FLOAT32 FLOAT64 BOOL"
NUMBERS = {
    int(GGUFValueType[name]): np.dtype(np.dtype(name.lower()).newbyteorder("<").str)
    for name in _NUMBERS.split()
}
SHORTER = "the file became shorter while it was read"


class GGUFError(FileError):
    """Error: a GGUF file is invalid, or GGUF cannot hold a value. It says what was expected and found."""


@dataclass(frozen=True)
class TensorInfo(TensorSpec):
    """Row of the tensor table: a tensor, the byte at which its data begins, and the number of its file."""

    offset: int
    part: int = 0


class Index:
    """Reader of an index, from start to end. Errors name the byte and the key or tensor being read.

    Names are only escaped for error messages, which saves time if there are hundreds of thousands of keys.
    """

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self.file, self.path, self.size = file, path, size
        self.at, self.end = 0, min(size, MAX_INDEX_BYTES)
        self.kind = self.name = ""  # "key" or "tensor", and its name once it has been read
        self.items = 0  # number of items in all arrays read so far

    def fault(self, problem: str, at: int | None = None) -> GGUFError:
        subject = f"{self.kind} {show(self.name)}: " if self.kind else ""
        return GGUFError(f"{self.path}: at byte {self.at if at is None else at}: {subject}{problem}")

    def need(self, count: int) -> None:
        remaining = self.end - self.at
        if count > remaining:
            rest = "" if self.end == self.size else f" of the {self.end} that an index may have"
            raise self.fault(f"expected {count} bytes, but only {remaining} are left{rest}")

    def take(self, count: int) -> bytes:
        self.need(count)
        data = self.file.read(count)
        if len(data) != count:
            raise self.fault(SHORTER)
        self.at += count
        return data

    def unsigned(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def next_name(self, kind: str, most: int) -> str:
        """Read the name of the next key or tensor. It has at most `most` bytes."""
        self.kind, self.name = kind, ""
        length = self.unsigned(8)
        if not 1 <= length <= most:
            raise self.fault(f"expected a name of 1 to {most} bytes, found {length}", self.at - 8)
        self.name = self.decode_text(self.take(length))
        return self.name

    def string(self) -> str:
        return self.decode_text(self.take(self.unsigned(8)))

    def decode_text(self, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            at, byte = self.at - len(raw) + error.start, raw[error.start]
            raise self.fault(f"expected UTF-8, found byte {byte:#04x}", at) from None

    def strings(self, count: int) -> list[str]:
        """Read `count` strings in blocks, because 300,000 calls of `string` would take a second."""
        self.need(8 * count)
        out: list[str] = []
        while len(out) < count:
            self.at += unpack_strings(self.file.read(min(self.end - self.at, BLOCK)), count, out)
            self.file.seek(self.at)
            if len(out) < count:  # the next string does not fit into the block, or is invalid
                out.append(self.string())
        return out

    def numbers(self, kind: int, count: int) -> npt.NDArray[Any]:
        dtype = NUMBERS.get(kind)
        if dtype is None:
            raise self.fault(f"expected a value type from 0 to 12, found {kind}")
        raw = self.take(count * dtype.itemsize)
        if kind == GGUFValueType.BOOL and raw.strip(b"\0\1"):
            raise self.fault("expected bools of 0 or 1, found another byte", self.at - len(raw))
        return np.frombuffer(raw, dtype)

    def array(self) -> npt.NDArray[Any] | list[str]:
        kind = self.unsigned(4)
        if kind == GGUFValueType.ARRAY:
            raise self.fault("expected an array of numbers, bools or strings, found nested arrays")
        count = self.unsigned(8)
        self.items += count
        if count <= self.end - self.at and self.items > MAX_ITEMS:
            raise self.fault(f"expected at most {MAX_ITEMS} items in all arrays, found {self.items}")
        return self.strings(count) if kind == GGUFValueType.STRING else self.numbers(kind, count)

    def value(self) -> Any:
        kind = self.unsigned(4)
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            return self.array()
        number = self.numbers(kind, 1)[0]
        return bool(number) if kind == GGUFValueType.BOOL else number

    def shape(self) -> tuple[int, ...]:
        dims = self.unsigned(4)
        if not 1 <= dims <= MAX_DIMS:
            raise self.fault(f"expected 1 to {MAX_DIMS} dims, found {dims}", self.at - 4)
        shape = tuple(self.unsigned(8) for _ in range(dims))[::-1]
        if 0 in shape:
            raise self.fault(f"expected dims of at least 1, found shape {shape}", self.at - 8 * dims)
        return shape

    def tensor(self, expected: int) -> TensorInfo:
        """Read a row of the tensor table. Its offset from the start of the data must be `expected`."""
        name, shape, kind = self.next_name("tensor", MAX_NAME_BYTES), self.shape(), self.unsigned(4)
        if kind not in GGML_QUANT_SIZES:
            raise self.fault(f"expected a known tensor type, found {kind}", self.at - 4)
        block, _ = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise self.fault(f"expected rows of a multiple of {block} elements, found {shape[-1]}")
        offset = self.unsigned(8)
        if offset != expected:
            raise self.fault(f"expected offset {expected}, found {offset}", self.at - 8)
        return TensorInfo(name, shape, GGMLQuantizationType(kind), offset)


def unpack_strings(block: bytes, count: int, out: list[str]) -> int:
    """Append strings of `block` to `out` until it has `count`. Return how many bytes they take in `block`.

    Stops before a string that is not complete in the block or is not UTF-8.
    """
    at, size = 0, len(block)
    for _ in range(count - len(out)):
        stop = at + 8 + int.from_bytes(block[at : at + 8], "little")
        if stop > size:
            break
        try:
            out.append(block[at + 8 : stop].decode())
        except UnicodeDecodeError:
            break
        at = stop
    return at


def read_index(index: Index) -> tuple[Metadata, dict[str, TensorInfo]]:
    """Return the keys, and the tensors in file order. A GGUFError names the byte at which the error is."""
    n_tensors, n_keys = _read_header(index)
    metadata: Metadata = {}
    for _ in range(n_keys):
        key = index.next_name("key", MAX_KEY_BYTES)
        if key in metadata:
            raise index.fault("expected once, found twice")
        metadata[key] = index.value()
        if key == ALIGNMENT_KEY and (problem := alignment_fault(metadata[key])):
            raise index.fault(problem)
    alignment, offset = int(metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)), 0
    tensors: dict[str, TensorInfo] = {}
    for _ in range(n_tensors):
        info = index.tensor(offset)
        if info.name in tensors:
            raise index.fault("expected once, found twice")
        tensors[info.name] = info
        offset += padded(info.nbytes, alignment)
    return metadata, _with_positions(index, tensors, alignment, CHECKPOINT_ID in metadata)


def _read_header(index: Index) -> tuple[int, int]:
    """Check magic and version. Return the number of tensors and the number of keys."""
    magic = index.take(4)
    if magic != MAGIC:
        raise index.fault(f"expected a GGUF file that starts with {MAGIC!r}, found {magic!r}", 0)
    version = index.unsigned(4)
    if version and version % 65536 == 0:
        raise index.fault("expected a little-endian file, found a big-endian one: convert it first", 4)
    if version not in VERSIONS:
        raise index.fault(f"expected GGUF version 2 or 3, found {version}", 4)
    n_tensors, n_keys = index.unsigned(8), index.unsigned(8)
    if n_keys > MAX_KEYS or n_tensors > MAX_TENSORS:
        most = f"at most {MAX_KEYS} keys and {MAX_TENSORS} tensors"
        raise index.fault(f"expected {most}, found {n_keys} keys and {n_tensors} tensors")
    return n_tensors, n_keys


def _with_positions(
    index: Index, tensors: dict[str, TensorInfo], alignment: int, strict: bool
) -> dict[str, TensorInfo]:
    """Return the table of tensors, with their positions in the file.

    `strict`: whether to refuse bytes after the last tensor, which no digest of a checkpoint covers.
    """
    start, end = padded(index.at, alignment), index.at
    for name, info in tensors.items():
        tensors[name] = row = replace(info, offset=start + info.offset)
        end, index.name = row.offset + info.nbytes, name
        if end > index.size:
            problem = f"expected data up to byte {end}, found the end of the file at byte {index.size}"
            raise index.fault(problem, row.offset)
    surplus = index.size - padded(end, alignment)
    if surplus > 0 and strict:
        raise index.fault(f"expected the end of the file, found {surplus} more bytes", index.size - surplus)
    return tensors


def padded(count: int, alignment: int) -> int:
    return -(-count // alignment) * alignment


def alignment_fault(value: Any) -> str:
    """Return what is wrong with an alignment; "" for an int or UINT32 that is a power of two in 8..2^20."""
    number = int(value) if isinstance(value, int | np.uint32) else 0
    if 8 <= number <= 1 << 20 and number & (number - 1) == 0:
        return ""
    return f"expected UINT32, a power of two in 8..2^20, found {type(value).__name__} {show(str(value))}"
