"""Ids as a 1-D .npy of uint16 or uint32.

The header is the source of a Python dictionary. NumPy evaluates it, with errors of a dozen kinds for what is
none; here it is matched: three keys, in any order, with values of one form each. Format:
https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

from __future__ import annotations

import re
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zero_mpi.data.token_file import TokenLayout, check_length, exactly
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import shown

MAGIC = b"\x93NUMPY"
LENGTHS = {(1, 0): 2, (2, 0): 4, (3, 0): 4}  # version of the format -> bytes of the header's length
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


def npy_layout(path: Path, file: FileIO) -> TokenLayout:
    """Where a .npy has its ids; UsageError for another array, ValueError for what is none."""
    header = _header(file)
    dtype = TYPES.get(header.dtype)
    if dtype is None or len(header.shape) != 1:
        found = f"found {NAMES.get(header.dtype, shown(header.dtype))} of shape {header.shape}"
        raise UsageError(f"{path}: expected a 1-D array of uint16 or uint32 ids, {found}")
    (count,) = header.shape
    check_length(file, header.start + count * dtype.itemsize)
    return TokenLayout([(header.start, count)], dtype)


def _header(file: FileIO) -> Header:
    """The header; ValueError for what is none."""
    head = exactly(file, 8)
    width = LENGTHS.get((head[6], head[7]))
    if head[:6] != MAGIC or width is None:
        raise ValueError(f"expected an array of NumPy that starts with {MAGIC!r}, found {head!r}")
    length = int.from_bytes(exactly(file, width), "little")
    if length > MAX_HEADER:
        raise ValueError(f"expected a header of at most {MAX_HEADER} bytes, found {length}")
    values = _dictionary(exactly(file, length).decode("latin-1"))
    dtype, shape = values["descr"][1:-1], _shape(values["shape"])
    if not _DTYPE.fullmatch(dtype) or dtype.endswith("O") or values["fortran_order"] not in ("True", "False"):
        raise ValueError(f"expected numbers, found elements of type {shown(dtype, 40)}")
    return Header(dtype, shape, 8 + width + length)


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
