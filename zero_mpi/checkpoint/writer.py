"""Writes GGUF files as a stream: keys and tensor table first, then one tensor at a time.

Memory is bounded by one tensor. A GGUF file has no names beside the data, so two tensors of one
size written in the wrong order would be swapped in silence: every write says its name, and the
name must be the next one announced. The keys and the table are packed here and not by the gguf
package's writer, because that drops empty strings and arrays, turns wide items into 32-bit ones,
and writes data with `ndarray.tofile`, whose error on a full disk has lost its errno.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFValueType

from zero_mpi.checkpoint.reader import (
    ALIGNMENT_KEY,
    DEFAULT_ALIGNMENT,
    MAGIC,
    MAX_DIMS,
    MAX_KEY_BYTES,
    MAX_NAME_BYTES,
    NUMBERS,
    GGUFError,
    alignment_is_sane,
    padded,
    show,
)

ARCHITECTURE_KEY = "general.architecture"
VERSION = 3
_TYPE_OF = {dtype: kind for kind, dtype in NUMBERS.items()}


class GGUFStream:
    """Writes one GGUF file of float32 tensors, tensor by tensor.

    `metadata` has values as the reader returns them; a plain int becomes UINT32, a plain float
    FLOAT32, an empty list an empty array of strings. `tensors` announces (name, shape) in the order
    of writing, shapes in NumPy order. `general.architecture` is always the first key.

    `checksums` maps each tensor written so far to the sha256 (hex) of its bytes in the file.

    Raises GGUFError, before the file is touched, for a key, value, name or shape that GGUF or
    llama.cpp would refuse; OSError as it came from the system, here and in every method.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        architecture: str,
        metadata: Mapping[str, Any],
        tensors: Sequence[tuple[str, tuple[int, ...]]],
    ) -> None:
        self.path = Path(path)
        self.checksums: dict[str, str] = {}
        try:
            keys = _with_architecture(architecture, metadata)
            self._alignment = _alignment(keys)
            self._shapes = _checked_table(tensors)
            index = _pack_index(keys, self._shapes, self._alignment)
        except GGUFError as error:
            raise GGUFError(f"{self.path}: {error}") from None
        self._order = list(self._shapes)
        self._file = open(self.path, "wb")  # noqa: SIM115 (closed by close or __exit__)
        self._put(index)

    def write(self, name: str, array: npt.NDArray[np.float32]) -> None:
        """Append the next tensor. ValueError unless it is the next one announced, in shape and dtype."""
        self._check_turn(name)
        expected = self._shapes[name]
        if array.dtype != np.float32 or array.shape != expected:
            found = f"{array.dtype} {array.shape}"
            raise ValueError(f"{self.path}: tensor {show(name)}: expected float32 {expected}, got {found}")
        data = np.ascontiguousarray(array).data.cast("B")
        self._put(data)
        self.checksums[name] = hashlib.sha256(data).hexdigest()

    def close(self) -> None:
        """Bring the file to disk. ValueError when announced tensors are missing. Twice is once."""
        if self._file.closed:
            return
        try:
            self._check_complete()
            self._file.flush()
            os.fsync(self._file.fileno())
        except BaseException as error:
            self._abandon()
            if isinstance(error, OSError):
                error.filename = error.filename or str(self.path)
            raise
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()

    def _put(self, data: bytes | memoryview) -> None:
        """`data` and its padding, so that whatever comes next starts aligned."""
        try:
            self._file.write(data)
            self._file.write(bytes(padded(len(data), self._alignment) - len(data)))
        except OSError as error:
            self._abandon()
            error.filename = error.filename or str(self.path)
            raise

    def _abandon(self) -> None:
        """Close the handle; the error that led here is the one to report, not a second flush's."""
        with suppress(OSError):
            self._file.close()

    def _check_turn(self, name: str) -> None:
        if self._file.closed:
            raise ValueError(f"{self.path}: expected an open stream, this one is closed: open a new one")
        done = len(self.checksums)
        if self._order[done : done + 1] != [name]:
            expected = show(self._order[done]) if done < len(self._order) else "no further tensor"
            raise ValueError(f"{self.path}: expected {expected}, got {show(name)}: keep the announced order")

    def _check_complete(self) -> None:
        missing = self._order[len(self.checksums) :]
        if missing:
            where = f"{len(missing)} of {len(self._order)} tensors, from {show(missing[0])} on"
            raise ValueError(f"{self.path}: expected all announced tensors, missing are {where}")


def _with_architecture(architecture: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    given = metadata.get(ARCHITECTURE_KEY, architecture)
    if not architecture or not isinstance(given, str) or given != architecture:
        found = f"{show(str(given))} beside architecture {show(architecture)}"
        raise GGUFError(f"key {ARCHITECTURE_KEY}: expected one name, not empty, found {found}")
    return {ARCHITECTURE_KEY: architecture, **metadata}


def _alignment(metadata: Mapping[str, Any]) -> int:
    value = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
    if not isinstance(value, int | np.uint32) or not alignment_is_sane(int(value)):
        found = f"{type(value).__name__} {show(str(value))}"
        raise GGUFError(f"key {ALIGNMENT_KEY}: expected UINT32, a power of two in 8..2^20, found {found}")
    return int(value)


def _checked_table(tensors: Sequence[tuple[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    table: dict[str, tuple[int, ...]] = {}
    for name, shape in tensors:
        if name in table:
            raise GGUFError(f"tensor {show(name)}: expected once, found twice")
        if not 1 <= len(shape) <= MAX_DIMS or min(shape) < 1:
            raise GGUFError(f"tensor {show(name)}: expected 1 to {MAX_DIMS} dims of 1 or more, got {shape}")
        table[name] = tuple(int(dim) for dim in shape)
    return table


def _pack_index(metadata: Mapping[str, Any], table: Mapping[str, tuple[int, ...]], alignment: int) -> bytes:
    """Header, keys and tensor table; the data follows at the next multiple of `alignment`."""
    parts = [MAGIC, _unsigned(VERSION, 4), _unsigned(len(table), 8), _unsigned(len(metadata), 8)]
    parts += [pack_key(key, value) for key, value in metadata.items()]
    offset = 0
    for name, shape in table.items():
        parts.append(_pack_tensor(name, shape, offset))
        offset += padded(4 * prod(shape), alignment)
    return b"".join(parts)


def _pack_tensor(name: str, shape: tuple[int, ...], offset: int) -> bytes:
    """One line of the tensor table: the dims from the contiguous one outwards."""
    dims = [_unsigned(len(shape), 4), *(_unsigned(dim, 8) for dim in reversed(shape))]
    place = [_unsigned(GGMLQuantizationType.F32, 4), _unsigned(offset, 8)]
    return b"".join([_pack_name(name, MAX_NAME_BYTES, "tensor"), *dims, *place])


def pack_key(key: str, value: Any) -> bytes:
    """Name, type and value of one key as they stand in the file. GGUFError names key and remedy."""
    name = _pack_name(key, MAX_KEY_BYTES, "key")
    try:
        kind, payload = _pack_value(value)
    except GGUFError as error:
        raise GGUFError(f"key {show(key)}: {error}") from None
    return name + _unsigned(kind, 4) + payload


def _pack_value(value: Any) -> tuple[int, bytes]:
    """(type of the value, its bytes). The order matters: a bool is an int, a np.float64 is a float."""
    if isinstance(value, str):
        return GGUFValueType.STRING, _pack_string(value)
    if isinstance(value, bool):
        return GGUFValueType.BOOL, bytes([value])
    if isinstance(value, list):
        return GGUFValueType.ARRAY, _pack_strings(value)
    if isinstance(value, np.ndarray):
        return GGUFValueType.ARRAY, _pack_numbers(value)
    number = np.asarray(value if isinstance(value, np.generic) else _widened(value))
    return _type_of(number), _little_endian(number)


def _widened(value: Any) -> np.generic:
    """A plain number as the NumPy scalar it is stored as."""
    if isinstance(value, int):
        if not 0 <= value < 1 << 32:
            raise GGUFError(f"expected an int from 0 to 2^32 - 1, found {value}: give np.int64 or the like")
        return np.uint32(value)
    if isinstance(value, float):
        if np.isfinite(value) and abs(value) > float(np.finfo(np.float32).max):
            raise GGUFError(f"expected a float in the range of FLOAT32, found {value}: give np.float64")
        return np.float32(value)
    raise GGUFError(f"expected str, bool, number, 1-D array or list of str, found {type(value).__name__}")


def _pack_numbers(array: npt.NDArray[Any]) -> bytes:
    if array.ndim != 1:
        raise GGUFError(f"expected a 1-D array, found shape {array.shape}: flatten it")
    return _unsigned(_type_of(array), 4) + _unsigned(array.size, 8) + _little_endian(array)


def _pack_strings(values: list[str]) -> bytes:
    wrong = next((i for i, value in enumerate(values) if not isinstance(value, str)), None)
    if wrong is not None:
        found = f"{type(values[wrong]).__name__} at place {wrong}"
        raise GGUFError(f"expected a list of str, found {found}: numbers go into a 1-D NumPy array")
    head = _unsigned(GGUFValueType.STRING, 4) + _unsigned(len(values), 8)
    return head + b"".join(map(_pack_string, values))


def _pack_name(name: str, most: int, what: str) -> bytes:
    packed = _pack_string(name)
    if not 1 <= len(packed) - 8 <= most:
        raise GGUFError(f"{what} {show(name)}: expected a name of 1 to {most} bytes, found {len(packed) - 8}")
    return packed


def _pack_string(value: str) -> bytes:
    try:
        raw = value.encode()
    except UnicodeEncodeError:
        raise GGUFError(f"expected text that UTF-8 can hold, found {show(value)}") from None
    return _unsigned(len(raw), 8) + raw


def _type_of(array: npt.NDArray[Any]) -> int:
    kind = _TYPE_OF.get(array.dtype.newbyteorder("<"))
    if kind is None:
        raise GGUFError(f"expected 8 to 64-bit integers, float32, float64 or bool, found dtype {array.dtype}")
    return kind


def _little_endian(array: npt.NDArray[Any]) -> bytes:
    return array.astype(array.dtype.newbyteorder("<")).tobytes()


def _unsigned(value: int, width: int) -> bytes:
    return value.to_bytes(width, "little")
