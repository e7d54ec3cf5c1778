"""The index of a GGUF file: header, keys and tensor table, read strictly.

A GGUF file is untrusted input. The index is read forward once; every count and length is compared with the
bytes left before anything is allocated or looped over, and sizes are Python integers, which do not wrap.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from zero_mpi.checkpoint.tensor_file import TensorSpec
from zero_mpi.errors import FileError
from zero_mpi.files.foreign import show

Metadata = dict[str, Any]
"""Keys in file order, values with the exact type of the file: `str`, `bool`, a NumPy scalar of the
key's width, a 1-D array of such or of bool (read-only as read), or `list[str]`."""

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # one layout; 3 only added big-endian files, which llama.cpp refuses, as we do
CHECKPOINT_ID = "training.checkpoint_id"
ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32
MAX_KEY_BYTES = 65535  # the format's limit
MAX_NAME_BYTES = 63  # llama.cpp's limit
MAX_DIMS = 4
MAX_INDEX_BYTES = 128 << 20  # six times the largest known; bounds time and memory on a hostile file
# Several times the largest known; each key and tensor takes some 500 bytes of memory, each text about 60.
MAX_KEYS, MAX_TENSORS, MAX_ITEMS = 1 << 19, 1 << 15, 1 << 21
BLOCK = 1 << 18  # bytes of strings that are read at once
SMALLEST_KEY = 8 + 1 + 4 + 1  # bytes: name of one byte, type, a value of one byte
SMALLEST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8  # bytes: name of one byte, dims, one dim, type, offset

_NUMBERS = "UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FLOAT32 FLOAT64 BOOL"
NUMBERS = {
    int(GGUFValueType[name]): np.dtype(np.dtype(name.lower()).newbyteorder("<").str)
    for name in _NUMBERS.split()
}
SHORTER = "the file became shorter while it was read"


class GGUFError(FileError):
    """A GGUF file, read or to be written, is invalid; the message has file, place, expected and found."""


@dataclass(frozen=True)
class TensorInfo(TensorSpec):
    """One line of the tensor table: where the data begins, in bytes, and in which part of a split file."""

    offset: int
    part: int = 0


class Index:
    """Forward reader of the index; every error names the byte offset `at`.

    Each read has a label in which {} stands for `subject`, the key or tensor that is being read. A name is
    escaped only when an error shows it, which saves time with hundreds of thousands of keys.
    """

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self.file, self.path, self.size = file, path, size
        self.at, self.end = 0, min(size, MAX_INDEX_BYTES)
        self.subject = ("key", "")
        self.items = 0  # items of arrays read so far

    def fault(self, what: str, at: int | None = None) -> GGUFError:
        return GGUFError(f"{self.path}: at byte {self.at if at is None else at}: {what}")

    def named(self, what: str) -> str:
        return what.replace("{}", f"{self.subject[0]} {show(self.subject[1])}")

    def need(self, count: int, what: str) -> None:
        left = self.end - self.at
        if count > left:
            rest = "" if self.end == self.size else f" of the {self.end} that an index may have"
            raise self.fault(f"{self.named(what)}: expected {count} bytes, found only {left} left{rest}")

    def take(self, count: int, what: str) -> bytes:
        if count > self.end - self.at:
            self.need(count, what)
        data = self.file.read(count)
        if len(data) != count:
            raise self.fault(SHORTER)
        self.at += count
        return data

    def unsigned(self, width: int, what: str) -> int:
        return int.from_bytes(self.take(width, what), "little")

    def string(self, what: str, least: int = 0, most: int = MAX_INDEX_BYTES) -> str:
        length = int.from_bytes(self.take(8, what), "little")
        if not least <= length <= most:
            place = self.named(what)
            raise self.fault(f"{place}: expected {least} to {most} bytes, found {length}", self.at - 8)
        return self.decoded(self.take(length, what), what)

    def decoded(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            at, found = self.at - len(raw) + error.start, raw[error.start]
            raise self.fault(f"{self.named(what)}: expected UTF-8, found byte {found:#04x}", at) from None

    def strings(self, count: int) -> list[str]:
        """Read a vocabulary, block by block: 300 000 calls of `string` would take a second."""
        self.need(8 * count, f"{count} strings of {{}}")
        out: list[str] = []
        while len(out) < count:
            self.at += unpack_strings(self.file.read(min(self.end - self.at, BLOCK)), count, out)
            self.file.seek(self.at)
            if len(out) < count:  # longer than what is left of the block, or wrong
                length = self.unsigned(8, f"string {len(out)} of {{}}")
                if length > self.end - self.at:
                    what = self.named(f"string {len(out)} of {{}}")
                    raise self.fault(f"{what}: its length of {length} passes the end", self.at - 8)
                out.append(self.decoded(self.take(length, "{}"), "{}"))
        return out

    def numbers(self, kind: int, count: int) -> npt.NDArray[Any]:
        dtype = NUMBERS.get(kind)
        if dtype is None:
            found = f"expected a value type from 0 to 12, found {kind}"
            raise self.fault(f"{self.named('{}')}: {found}", self.at)
        raw = self.take(count * dtype.itemsize, "{}")
        if kind == GGUFValueType.BOOL and raw.strip(b"\0\1"):
            found = "expected bools of 0 or 1, found another byte"
            raise self.fault(f"{self.named('{}')}: {found}", self.at - len(raw))
        return np.frombuffer(raw, dtype)

    def array(self) -> npt.NDArray[Any] | list[str]:
        kind = self.unsigned(4, "item type of {}")
        if kind == GGUFValueType.ARRAY:
            found = "expected an array of numbers, bools or strings, found nested arrays"
            raise self.fault(f"{self.named('{}')}: {found}")
        count = self.unsigned(8, "number of items of {}")
        self.items += count
        if count <= self.end - self.at and self.items > MAX_ITEMS:
            what = self.named("{}")
            raise self.fault(f"{what}: expected at most {MAX_ITEMS} items in all arrays, found {self.items}")
        return self.strings(count) if kind == GGUFValueType.STRING else self.numbers(kind, count)

    def value(self) -> Any:
        kind = self.unsigned(4, "type of {}")
        if kind == GGUFValueType.STRING:
            return self.string("{}")
        if kind == GGUFValueType.ARRAY:
            return self.array()
        number = self.numbers(kind, 1)[0]
        return bool(number) if kind == GGUFValueType.BOOL else number

    def shape(self) -> tuple[int, ...]:
        dims = self.unsigned(4, "number of dims of {}")
        what = self.named("{}")
        if not 1 <= dims <= MAX_DIMS:
            raise self.fault(f"{what}: expected 1 to {MAX_DIMS} dims, found {dims}", self.at - 4)
        shape = tuple(self.unsigned(8, "dims of {}") for _ in range(dims))[::-1]
        if 0 in shape:
            raise self.fault(f"{what}: expected dims of at least 1, found shape {shape}", self.at - 8 * dims)
        return shape

    def tensor(self, expected: int) -> TensorInfo:
        """Read one line of the table; its offset, still relative to the data, must be `expected`."""
        name = self.string("name of a tensor", 1, MAX_NAME_BYTES)
        self.subject = ("tensor", name)
        what = self.named("{}")
        shape = self.shape()
        kind = self.unsigned(4, "type of {}")
        if kind not in GGML_QUANT_SIZES:
            raise self.fault(f"{what}: expected a known tensor type, found {kind}", self.at - 4)
        block, _ = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise self.fault(f"{what}: expected rows of a multiple of {block} elements, found {shape[-1]}")
        offset = self.unsigned(8, "offset of {}")
        if offset != expected:
            raise self.fault(f"{what}: expected offset {expected}, found {offset}", self.at - 8)
        return TensorInfo(name, shape, GGMLQuantizationType(kind), offset)


def unpack_strings(block: bytes, count: int, out: list[str]) -> int:
    """Add to `out` the strings that begin a block, up to `count` in all; return how many bytes they take.

    It stops before one that the block does not hold in full or that is not UTF-8.
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
    """Return (keys, tensors) of a file, tensors in its order. GGUFError names the byte of the error."""
    n_tensors, n_keys = _read_header(index)
    metadata: Metadata = {}
    for _ in range(n_keys):
        key = index.string("name of a key", 1, MAX_KEY_BYTES)
        if key in metadata:
            raise index.fault(f"key {show(key)}: expected once, found twice")
        index.subject = ("key", key)
        metadata[key] = index.value()
    value = metadata.get(ALIGNMENT_KEY, np.uint32(DEFAULT_ALIGNMENT))
    if not isinstance(value, np.uint32) or not alignment_is_sane(int(value)):
        found = str(value) if isinstance(value, np.uint32) else type(value).__name__
        raise index.fault(f"key {ALIGNMENT_KEY}: expected UINT32, a power of two in 8..2^20, found {found}")
    alignment, offset = int(value), 0
    tensors: dict[str, TensorInfo] = {}
    for _ in range(n_tensors):
        info = index.tensor(offset)
        if info.name in tensors:
            raise index.fault(f"tensor {show(info.name)}: expected once, found twice")
        tensors[info.name] = info
        offset += padded(info.nbytes, alignment)
    return metadata, _placed(index, tensors, alignment, CHECKPOINT_ID in metadata)


def _read_header(index: Index) -> tuple[int, int]:
    """Return (number of tensors, number of keys), after checking magic and version."""
    magic = index.take(4, "magic")
    if magic != MAGIC:
        raise index.fault(f"expected a GGUF file that starts with {MAGIC!r}, found {magic!r}", 0)
    version = index.unsigned(4, "version")
    if version and version % 65536 == 0:
        raise index.fault("expected a little-endian file, found a big-endian one: convert it first", 4)
    if version not in VERSIONS:
        raise index.fault(f"expected GGUF version 2 or 3, found {version}", 4)
    n_tensors, n_keys = index.unsigned(8, "number of tensors"), index.unsigned(8, "number of keys")
    index.need(n_tensors * SMALLEST_TENSOR + n_keys * SMALLEST_KEY, f"{n_keys} keys and {n_tensors} tensors")
    if n_keys > MAX_KEYS or n_tensors > MAX_TENSORS:
        most = f"at most {MAX_KEYS} keys and {MAX_TENSORS} tensors"
        raise index.fault(f"expected {most}, found {n_keys} and {n_tensors}")
    return n_tensors, n_keys


def _placed(
    index: Index, tensors: dict[str, TensorInfo], alignment: int, whole: bool
) -> dict[str, TensorInfo]:
    """Return the table with places in the file.

    `whole`: refuse bytes behind the last tensor, which a checkpoint's digests do not cover; others may pad.
    """
    start, end = padded(index.at, alignment), index.at
    for name, info in tensors.items():
        tensors[name] = placed = replace(info, offset=start + info.offset)
        end = placed.offset + info.nbytes
        if end > index.size:
            found = f"expected data up to byte {end}, found the end of the file at byte {index.size}"
            raise index.fault(f"tensor {show(name)}: {found}", placed.offset)
    surplus = index.size - padded(end, alignment)
    if surplus > 0 and whole:
        raise index.fault(f"expected the end of the file, found {surplus} more bytes", index.size - surplus)
    return tensors


def padded(count: int, alignment: int) -> int:
    """Return `count` bytes rounded up to a multiple of `alignment`."""
    return -(-count // alignment) * alignment


def alignment_is_sane(value: int) -> bool:
    """Return whether `value` is a power of two from 8 (the format's minimum) to 1 MiB (wastes no disk)."""
    return 8 <= value <= 1 << 20 and value & (value - 1) == 0
