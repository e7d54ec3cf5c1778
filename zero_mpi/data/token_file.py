"""A token file: a 1-D .npy of uint16 or uint32 ids, looked at once for its digest, and then read by places.

The header is the source of a Python dictionary. NumPy evaluates it, with errors of a dozen kinds for what is
none; here it is matched: three keys, in any order, with values of one form each. The file must be as long as
its header says, so nothing is read that is not ids. What is larger than `WHOLE` is looked at here and there,
for a run on terabytes begins as soon as any other. Format:
https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

from __future__ import annotations

import hashlib
import os
import re
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zero_mpi.data.token_spans import FileSpan, TokenSpans
from zero_mpi.errors import JobError, UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import open_file

Ids = NDArray[np.unsignedinteger[Any]]

MAGIC = b"\x93NUMPY"
LENGTHS = {(1, 0): 2, (2, 0): 4, (3, 0): 4}  # version of the format -> bytes of the header's length
WHOLE = 1 << 30  # bytes of a file that is read from end to end for its digest, in half a second
MAX_HEADER = 1 << 16  # bytes; NumPy writes 118
MAX_DIMS = 64  # NumPy's own limit
TYPES: dict[str, np.dtype[Any]] = {"<u2": np.dtype("<u2"), "<u4": np.dtype("<u4")}
NAMES = {np.dtype(code).str: np.dtype(code).name for code in "?bBhHiIlLqQefdFD"}
_QUOTED = r"'[^'\\]*'|\"[^\"\\]*\""
_PAIR = re.compile(rf"\s*({_QUOTED})\s*:\s*({_QUOTED}|True|False|\([0-9L,\s]*\))\s*(?:,\s*|$)")
_DTYPE = re.compile(r"[<>|=]?[a-zA-Z?][0-9]{0,9}")


class Header(NamedTuple):
    """What a file says of its array; `start`: the byte where the elements begin."""

    dtype: str
    shape: tuple[int, ...]
    start: int


def read_token_file(path: Path, vocab: int, block: int) -> tuple[TokenSpans, bytes]:
    """(where the ids lie, a digest). The ids stay in the file; those outside the vocabulary are refused.

    `block`: how many ids are looked at together. The digest is the sha256 of a file of at most `WHOLE` bytes;
    of a larger one it is `TokenSpans.sampled_digest`, and its other ids are looked at when they are read.
    Raises UsageError.
    """
    try:
        with open_file(path, "a token file") as file:
            header = _header(file)
            dtype = TYPES.get(header.dtype)
            if dtype is None or len(header.shape) != 1:
                found = f"found {NAMES.get(header.dtype, shown(header.dtype))} of shape {header.shape}"
                raise UsageError(f"{path}: expected a 1-D array of uint16 or uint32 ids, {found}")
            (count,) = header.shape
            length = header.start + count * dtype.itemsize
            _check_length(file, length)
            real = os.path.abspath(os.fsdecode(file.name))
            spans = TokenSpans([FileSpan(real, header.start, count, dtype, length)], vocab)
            if length > WHOLE:
                return spans, spans.sampled_digest()
            return spans, _look_through(path, file, header.start, dtype, block, vocab)
    except UsageError:
        raise
    except JobError as error:  # found before the job has begun
        raise UsageError(str(error)) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read {path} as a token file: {why}") from error


def _header(file: FileIO) -> Header:
    """The header; ValueError for what is none."""
    head = _exactly(file, 8)
    width = LENGTHS.get((head[6], head[7]))
    if head[:6] != MAGIC or width is None:
        raise ValueError(f"expected an array of NumPy that starts with {MAGIC!r}, found {head!r}")
    length = int.from_bytes(_exactly(file, width), "little")
    if length > MAX_HEADER:
        raise ValueError(f"expected a header of at most {MAX_HEADER} bytes, found {length}")
    values = _dictionary(_exactly(file, length).decode("latin-1"))
    dtype, shape = values["descr"][1:-1], _shape(values["shape"])
    if not _DTYPE.fullmatch(dtype) or dtype.endswith("O") or values["fortran_order"] not in ("True", "False"):
        raise ValueError(f"expected numbers, found elements of type {shown(dtype, 40)}")
    return Header(dtype, shape, 8 + width + length)


def _exactly(file: FileIO, count: int) -> bytes:
    data = file.read(count)
    if len(data or b"") != count:
        raise ValueError(f"expected {count} bytes more, found the end of the file")
    return data


def _dictionary(text: str) -> dict[str, str]:
    """The three values of a header, as they are written there."""
    inner = text.strip()
    found: dict[str, str] = {}
    at, end = 1, len(inner) - 1
    if inner[:1] == "{" and inner[-1:] == "}":
        while at < end and (pair := _PAIR.match(inner, at, end)):
            found[pair[1][1:-1]] = pair[2]
            at = pair.end()
    if at < end or found.keys() != {"descr", "fortran_order", "shape"} or found["descr"][0] not in "'\"":
        raise ValueError(f"expected the header of an array of numbers, found {shown(text, 80)}")
    return found


def _shape(text: str) -> tuple[int, ...]:
    parts = [part.strip().removesuffix("L") for part in text[1:-1].split(",") if part.strip()]
    if text[:1] != "(" or len(parts) > MAX_DIMS or not all(0 < len(p) < 20 and p.isdigit() for p in parts):
        raise ValueError(f"expected a shape of whole numbers, found {shown(text, 80)}")
    return tuple(map(int, parts))


def _check_length(file: FileIO, expected: int) -> None:
    found = os.fstat(file.fileno()).st_size
    if found != expected:
        raise ValueError(f"expected {expected} bytes, as its header says, found {found}")


def _look_through(
    path: Path, file: FileIO, start: int, dtype: np.dtype[Any], block: int, vocab: int
) -> bytes:
    """The digest of the whole file, in one pass that reads: pages of a map would count as ours."""
    total = hashlib.sha256()
    file.seek(0)
    total.update(_exactly(file, start))
    at, room = 0, np.empty(block, dtype)
    while got := _fill(file, room):
        ids = room[: got // dtype.itemsize]
        total.update(ids.data)
        if ids.max() >= vocab:
            place = int(np.argmax(ids >= vocab))
            problem = f"id {ids[place]} at position {at + place} is outside the vocabulary of {vocab}"
            raise UsageError(f"{path}: {problem}: use a larger --vocab-size or other token files")
        at += len(ids)
    return total.digest()


def _fill(file: FileIO, room: Ids) -> int:
    """Read until `room` is full or the file ends; the system may give it in parts."""
    view, at = room.data.cast("B"), 0
    while at < len(view) and (got := file.readinto(view[at:])):
        at += got
    return at
