"""Streams of bytes and lines from text files, packed (compressed) or not.

A packed file can only be read from its beginning, so each rank reads it once and takes all of the rank's
parts in file order.
"""

import gzip
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, Self, TypeVar

from zero_mpi.errors import FileError, UsageError, import_optional, prefixed
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import open_file, reason
from zero_mpi.files.parse import parse_json

BLOCK = 1 << 20
UNREADABLE = OSError, EOFError, zlib.error, ValueError
MOST = 16 << 20  # maximum bytes of a line
MOST_UNPACKED = 1 << 30  # limit in bytes of an unpacked text that is held in memory as one document
MOST_RATIO, FREE_BYTES = 50, 8 << 20  # limit in unpacked bytes: MOST_RATIO times the file, or FREE_BYTES


def _zstd(file: FileIO) -> Any:
    library = import_optional("reading zstd files", "arrow", "pyarrow")
    return library.CompressedInputStream(library.PythonFile(file, mode="r"), "zstd")


PACKINGS: dict[str, Callable[[FileIO], Any]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file, mode="rb"),
    ".zst": _zstd,
}


def packing_of(name: str) -> str:
    """Return the suffix of a name, which says how the file is packed; empty if it is not packed."""
    return next((suffix for suffix in PACKINGS if name.lower().endswith(suffix)), "")


class TextStream:
    """Unpacked bytes of a file, from the first byte on. `at`: number of bytes read or skipped.

    `read` calls `beat` at each block, because reading a file may take long.
    Raises FileError if a file cannot be read or is not packed as its name says.
    """

    def __init__(self, path: Path, beat: Callable[[], object] = lambda: None) -> None:
        self.path, self.at, self.stop, self._beat = path, 0, 0, beat
        self._packing, self._raw = packing_of(path.name), open_file(path, "a file of text")
        with self._reading():
            unpacked = PACKINGS[self._packing](self._raw) if self._packing else self._raw
            self._file = BufferedReader(unpacked, BLOCK)

    def close(self) -> None:
        self._file.close()
        self._raw.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def read(self, count: int) -> bytes:
        """Return `count` bytes, or the rest of the file; a large `count` by itself uses no memory."""
        parts = list[bytes]()
        while count:
            with self._reading():
                part = self._file.read(min(count, BLOCK))
            if not part:
                break
            parts.append(part)
            count -= len(part)
            self.at += len(part)
            self._beat()
        return b"".join(parts)

    def pass_over(self, count: int) -> None:
        if not self._packing:
            self._file.seek(self.at + count)
            self.at += count
            return
        while count and (data := self.read(min(count, BLOCK))):
            count -= len(data)

    def line(self) -> bytes:
        """Return the next line with its end, at most its first `MOST` + 1 bytes; b"" after the last line.

        A `BOM` at the start of the file is removed.
        """
        mark = b"" if self.at else BOM
        first = part = self._read_line()
        while len(part) > MOST and not part.endswith(b"\n"):
            part = self._read_line()
        return first.removeprefix(mark)

    def _read_line(self) -> bytes:
        try:
            part = self._file.readline(MOST + 1)
        except UNREADABLE as error:
            raise self._refusal(error) from None
        self.at += len(part)
        return part

    def all_lines(self) -> Iterator[bytes]:
        """Yield all lines, as `line` returns them; then close the file."""
        with self:
            while raw := self.line():
                yield raw

    def lines(self, first: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, line) for the lines that begin in [first, stop) and after the current position."""
        if first and self.stop != first:  # it is unknown whether a line begins at `first`
            self.pass_over(first - 1 - self.at)
            self.line()
        while (place := self.at) < stop and (raw := self.line()):
            yield place, raw
        self.stop = stop

    def reaches(self, first: int) -> bool:
        """Return whether the lines from an offset on can still be read."""
        return self.stop == first or self.at < first

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except UsageError:
            raise
        except UNREADABLE as error:
            raise self._refusal(error) from None

    def _refusal(self, error: Exception) -> FileError:
        return FileError(f"{shown(self.path)}: cannot be read: {shown(reason(error), 120)}")


def length_of(path: Path, beat: Callable[[], object]) -> int:
    """Return the unpacked size of a packed file in bytes; calls `beat` from time to time."""
    with TextStream(path, beat) as stream:
        while stream.read(BLOCK):
            pass
        return stream.at


def line_number(path: Path, place: int) -> int:
    """Return the number, from 1, of the line that begins at an offset; reads all lines before it."""
    number = 1
    with TextStream(path) as stream:
        while data := stream.read(min(BLOCK, place - stream.at)):
            number += data.count(b"\n")
    return number


BOM = b"\xef\xbb\xbf"  # byte order mark of UTF-8, which some programs write first
PLACE = re.compile(r": line \d+ (column \d+) \(char \d+\)$")  # end of Python's message for invalid JSON
T = TypeVar("T")


def each_line(
    path: Path,
    flag: str,
    read: Callable[[int, Any], T],
    lines: Iterable[bytes] | None = None,
    bad: Callable[[int, ValueError], object] | None = None,
) -> Iterator[T]:
    """Yield read(line number, JSON value) for each line that is not blank, with one line in memory at a time.

    A ValueError, such as one of `read`, becomes a FileError that names `flag`, file and line.
    lines: lines to read instead of the file's; bad: called for an invalid line, instead of a FileError
    """
    for number, raw in enumerate(_lines_of(path, flag, lines), 1):
        if not raw.strip():
            continue
        try:
            if len(raw) > MOST:
                raise ValueError(f"expected at most {MOST} bytes, found more")
            entry = read(number, _value(raw))
        except ValueError as error:
            if bad is None:
                raise FileError(f"{flag} {shown(path)}, line {number}: {error}") from None
            bad(number, error)
        else:
            yield entry


def _lines_of(path: Path, flag: str, lines: Iterable[bytes] | None) -> Iterator[bytes]:
    with prefixed(flag):
        yield from TextStream(path).all_lines() if lines is None else lines


def _value(text: bytes) -> Any:
    """Return the value of a line; raise ValueError with the column, since the caller names the line."""
    try:
        return parse_json(text.rstrip(b"\r\n"), unique=True)
    except ValueError as error:
        message, count = PLACE.subn(r" at \1", str(error))
        raise ValueError(f"no JSON: {message}" if count else message) from None


def is_text(value: Any) -> bool:
    """Return whether a value is a text that UTF-8 can encode: JSON can also hold lone surrogates."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False
