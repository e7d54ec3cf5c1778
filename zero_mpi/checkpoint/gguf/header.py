"""Packs the start of a GGUF file (header, keys, tensor table) into bytes and computes each tensor's offset.

`index.py` reads what this module packs. This module opens no file, because either one rank writes the file as
a stream, or several ranks write it together. We do not use the gguf package's writer, because it drops empty
strings and arrays and converts wide integers to 32 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from zero_mpi.checkpoint.gguf.index import (
    ALIGNMENT_KEY,
    DEFAULT_ALIGNMENT,
    MAGIC,
    MAX_DIMS,
    MAX_KEY_BYTES,
    MAX_NAME_BYTES,
    NUMBERS,
    GGUFError,
    alignment_fault,
    padded,
)
from zero_mpi.checkpoint.tensor_file import TensorSpec
from zero_mpi.files.foreign import show

ARCHITECTURE_KEY = "general.architecture"
VERSION = 3
_TYPE_OF = {dtype: kind for kind, dtype in NUMBERS.items()}
_TEXT = int(GGUFValueType.STRING).to_bytes(4, "little")
_OF_SCALARS = {dtype.type: kind.to_bytes(4, "little") for kind, dtype in NUMBERS.items()}

TableRow = tuple[str, tuple[int, ...]] | tuple[str, tuple[int, ...], GGMLQuantizationType]
"""Name, shape in NumPy order, and type (default F32) of a tensor that is to be written."""


def pack_file(
    architecture: str, metadata: Mapping[str, Any], tensors: Sequence[TableRow]
) -> tuple[bytes, dict[str, int], int]:
    """Return (header, offsets, total) of a GGUF file with these keys and tensors.

    `header` is everything before the data, padding included. `offsets` maps each tensor to the byte in the
    file at which its data begins. `total` is the file's length in bytes. Bytes between tensors are zeros.
    Values have the types that the reader returns; a plain int becomes UINT32, a plain float FLOAT32, an empty
    list an empty array of strings. `general.architecture` is always the first key.

    Raises GGUFError for a key, value, name, shape or type that GGUF or llama.cpp does not allow.
    """
    arch = metadata.get(ARCHITECTURE_KEY, architecture)
    if not architecture or not isinstance(arch, str) or arch != architecture:
        names = f"{show(str(arch))} and architecture {show(architecture)}"
        raise GGUFError(f"key {ARCHITECTURE_KEY}: expected one non-empty name, found {names}")
    keys = {ARCHITECTURE_KEY: architecture, **metadata}
    alignment = alignment_of(keys)
    offsets, end, lines = {}, 0, []
    for spec in checked_table(tensors).values():
        dims = [_unsigned(len(spec.shape), 4), *(_unsigned(dim, 8) for dim in reversed(spec.shape))]
        place = [_unsigned(spec.type, 4), _unsigned(end, 8)]
        lines.append(b"".join([_pack_name(spec.name, MAX_NAME_BYTES, "tensor"), *dims, *place]))
        offsets[spec.name] = end
        end += padded(spec.nbytes, alignment)
    parts = [MAGIC, _unsigned(VERSION, 4), _unsigned(len(lines), 8), _unsigned(len(keys), 8)]
    parts += [pack_key(key, value) for key, value in keys.items()]
    head = b"".join(parts + lines)
    start = padded(len(head), alignment)
    positions = {name: start + offset for name, offset in offsets.items()}
    return head.ljust(start, b"\0"), positions, start + end


def alignment_of(metadata: Mapping[str, Any]) -> int:
    """Return the alignment that the keys set, or the default. Raise GGUFError if it is invalid."""
    value = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
    if problem := alignment_fault(value):
        raise GGUFError(f"key {ALIGNMENT_KEY}: {problem}")
    return int(value)


def checked_table(tensors: Sequence[TableRow]) -> dict[str, TensorSpec]:
    """Return the tensors by name. Raise GGUFError for a tensor that a loader would refuse."""
    table: dict[str, TensorSpec] = {}
    for name, shape, *kind in tensors:
        if name in table:
            raise GGUFError(f"tensor {show(name)}: expected once, found twice")
        if not 1 <= len(shape) <= MAX_DIMS or min(shape) < 1:
            raise GGUFError(f"tensor {show(name)}: expected 1 to {MAX_DIMS} dims of 1 or more, got {shape}")
        spec = TensorSpec(name, tuple(map(int, shape)), *(kind or [GGMLQuantizationType.F32]))
        block, _ = GGML_QUANT_SIZES[spec.type]
        if spec.shape[-1] % block:
            problem = f"expected rows of a multiple of {block} elements for {spec.type.name}, got {shape}"
            raise GGUFError(f"tensor {show(name)}: {problem}")
        table[name] = spec
    return table


def pack_key(key: str, value: Any) -> bytes:
    """Return the bytes of a key in a file: name, type and value. A GGUFError names the key."""
    name = _pack_name(key, MAX_KEY_BYTES, "key")
    if (number := _OF_SCALARS.get(type(value))) is not None:  # first, because a file may have 500,000 scalars
        return name + number + bytes(value.data)
    try:
        if isinstance(value, str):
            return name + _TEXT + _pack_string(value)
        kind, payload = _pack_value(value)
    except GGUFError as error:
        raise GGUFError(f"key {show(key)}: {error}") from None
    return name + _unsigned(kind, 4) + payload


def _pack_value(value: Any) -> tuple[int, bytes]:
    """Return the type and the bytes of a value that is not a single string.

    The order of the tests matters: bool is a subclass of int, and np.float64 is a subclass of float.
    """
    if isinstance(value, bool):
        return GGUFValueType.BOOL, bytes([value])
    if isinstance(value, list):
        index = next((i for i, item in enumerate(value) if not isinstance(item, str)), None)
        if index is not None:
            actual = f"{type(value[index]).__name__} at index {index}"
            raise GGUFError(f"expected a list of str, found {actual}: numbers go into a 1-D NumPy array")
        head = _unsigned(GGUFValueType.STRING, 4) + _unsigned(len(value), 8)
        return GGUFValueType.ARRAY, head + b"".join(map(_pack_string, value))
    if isinstance(value, np.ndarray):
        if value.ndim != 1:
            raise GGUFError(f"expected a 1-D array, found shape {value.shape}: flatten it")
        head = _unsigned(_type_of(value), 4) + _unsigned(value.size, 8)
        return GGUFValueType.ARRAY, head + _little_endian(value)
    number = np.asarray(value if isinstance(value, np.generic) else _numpy_scalar(value))
    return _type_of(number), _little_endian(number)


def _numpy_scalar(value: Any) -> np.generic:
    if isinstance(value, int):
        if not 0 <= value < 1 << 32:
            raise GGUFError(f"expected an int from 0 to 2^32 - 1, found {value}: use np.int64 or similar")
        return np.uint32(value)
    if isinstance(value, float):
        if np.isfinite(value) and abs(value) > float(np.finfo(np.float32).max):
            raise GGUFError(f"expected a float in the range of FLOAT32, found {value}: use np.float64")
        return np.float32(value)
    raise GGUFError(f"expected str, bool, number, 1-D array or list of str, found {type(value).__name__}")


def _pack_name(name: str, most: int, kind: str) -> bytes:
    packed = _pack_string(name)
    if not 1 <= len(packed) - 8 <= most:
        raise GGUFError(f"{kind} {show(name)}: expected a name of 1 to {most} bytes, found {len(packed) - 8}")
    return packed


def _pack_string(value: str) -> bytes:
    try:
        raw = value.encode()
    except UnicodeEncodeError:
        raise GGUFError(f"expected text that UTF-8 can hold, found {show(value)}") from None
    return _unsigned(len(raw), 8) + raw


def _type_of(array: npt.NDArray[Any]) -> int:
    kind: int | None = _TYPE_OF.get(array.dtype.newbyteorder("<"))
    if kind is None:
        raise GGUFError(f"expected 8 to 64-bit integers, float32, float64 or bool, found dtype {array.dtype}")
    return kind


def _little_endian(array: npt.NDArray[Any]) -> bytes:
    return array.astype(array.dtype.newbyteorder("<")).tobytes()


def _unsigned(value: int, width: int) -> bytes:
    return value.to_bytes(width, "little")
