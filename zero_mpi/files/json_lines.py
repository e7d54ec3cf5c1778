"""JSON lines files, with one value per line: blank lines are skipped, a bad line is named by its number."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from zero_mpi.errors import FileError, prefixed
from zero_mpi.files.foreign import shown
from zero_mpi.files.parse import parse_json
from zero_mpi.files.text_streams import MOST, TextStream

BOM = b"\xef\xbb\xbf"  # byte order mark of UTF-8, which some programs write first
PLACE = re.compile(r": line \d+ (column \d+) \(char \d+\)$")  # place where a text of one line is no JSON
T = TypeVar("T")


def each_line(
    path: Path,
    flag: str,
    read: Callable[[int, Any], T],
    lines: Iterable[bytes] | None = None,
    bad: Callable[[int, ValueError], object] | None = None,
) -> Iterator[T]:
    """Yield the results of `read` for each line's number, from 1, and value; one line is held at a time.

    A ValueError of `read` and any other failure becomes a FileError, which names `flag`, file and line.
    lines: lines of a file of another kind, used instead; bad: gets a line in error instead of a FileError
    """
    for number, raw in enumerate(_flagged(path, flag, lines), 1):
        text = raw.removeprefix(BOM) if number == 1 else raw
        if not text.strip():
            continue
        try:
            if len(raw) > MOST:
                raise ValueError(f"expected at most {MOST} bytes, found more")
            found = read(number, _value(text))
        except ValueError as error:
            if bad is None:
                raise FileError(f"{flag} {shown(path)}, line {number}: {error}") from None
            bad(number, error)
        else:
            yield found


def _flagged(path: Path, flag: str, lines: Iterable[bytes] | None) -> Iterator[bytes]:
    with prefixed(flag):
        yield from TextStream(path).each_line() if lines is None else lines


def _value(text: bytes) -> Any:
    """Return the value of a line; ValueError with the column alone, because the caller names the line."""
    try:
        return parse_json(text.rstrip(b"\r\n"), unique=True)
    except ValueError as error:
        told, count = PLACE.subn(r" at \1", str(error))
        raise ValueError(f"no JSON: {told}" if count else told) from None


def is_text(value: Any) -> bool:
    """Return whether a value is a text that has bytes: JSON can hold half a letter pair, which has none."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False
