"""Files of JSON lines, a value in each: blank lines are passed over, a bad one is named by its number."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from io import BufferedReader
from typing import Any, TypeVar

from zero_mpi.errors import FileError
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import open_file, reason
from zero_mpi.files.parse import parse_json

MOST = 16 << 20  # bytes of a line
BOM = b"\xef\xbb\xbf"  # of UTF-8, which some programs put first
T = TypeVar("T")


def each_line(path: str | os.PathLike[str], flag: str, read: Callable[[int, Any], T]) -> Iterator[T]:
    """What `read` makes of the number of each line, from 1, and of its value; one line is held at a time.

    A ValueError of `read` and all else that is wrong becomes a FileError, which names `flag`, file and line.
    """
    place = f"{flag} {shown(path)}"
    for number, raw in enumerate(_lines(path, flag), 1):
        if len(raw) > MOST:
            raise FileError(f"{place}, line {number}: expected at most {MOST} bytes, found more")
        text = raw.removeprefix(BOM) if number == 1 else raw
        if text.strip():
            try:
                found = read(number, parse_json(text, unique=True))
            except ValueError as error:
                raise FileError(f"{place}, line {number}: {error}") from None
            yield found


def _lines(path: str | os.PathLike[str], flag: str) -> Iterator[bytes]:
    """The lines of a regular file; of one that is too long the beginning, which is the last that comes."""
    try:
        with BufferedReader(open_file(path, "a file of JSON lines")) as file:
            while raw := file.readline(MOST + 1):
                yield raw
    except FileError as error:
        raise FileError(f"{flag} {error}") from None
    except OSError as error:
        raise FileError(f"{flag} {shown(path)}: cannot be read: {reason(error)}") from None


def is_text(value: Any) -> bool:
    """Whether a value is a text that has bytes: JSON can say half of a pair of letters, which has none."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False
