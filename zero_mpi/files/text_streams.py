"""Files of text as streams of bytes, packed or not, and lines of them that begin between two places.

What is packed can only be read from its beginning on. That costs little beside the encoding of what it holds,
so each rank runs through such a file once, for all of its pieces, which come in the order of the file.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader, FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from zero_mpi.errors import FileError, UsageError, import_optional
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import open_file, reason

BLOCK = 1 << 20
MOST = 16 << 20  # bytes of a line
MOST_UNPACKED = 1 << 30  # bytes of a packed text, which becomes one document and is held whole


def _zstd(file: FileIO) -> Any:
    library = import_optional("files of zstd", "arrow", "pyarrow")
    return library.CompressedInputStream(library.PythonFile(file, mode="r"), "zstd")


class Packing(NamedTuple):
    """How the bytes of a file are packed: the end of its name, and what unpacks an open file."""

    suffix: str
    unpack: Callable[[FileIO], Any]


PACKINGS = (
    Packing(".gz", lambda file: gzip.GzipFile(fileobj=file, mode="rb")),
    Packing(".zst", _zstd),
)


def packing_named(name: str) -> Packing | None:
    """How a file of such a name is packed; None: it is not."""
    return next((each for each in PACKINGS if name.lower().endswith(each.suffix)), None)


class TextStream:
    """The bytes of a file, unpacked, from the first on. `at`: how many were read or passed over.

    `beat` is called at each block, since a file may take long.
    Raises FileError for a file that cannot be read, or is not packed as its name says.
    """

    def __init__(self, path: Path, beat: Callable[[], object] = lambda: None) -> None:
        self.path, self.at, self.stop, self._beat = path, 0, 0, beat
        packing = packing_named(path.name)
        self._raw, self._seekable = open_file(path, "a file of text"), packing is None
        with self._reading():
            self._file = BufferedReader(self._raw if packing is None else packing.unpack(self._raw), BLOCK)

    def close(self) -> None:
        """Close the file that is read."""
        self._file.close()
        self._raw.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self, count: int) -> bytes:
        """So many bytes, or what is left of the file; there need not be memory for more."""
        parts = list[bytes]()
        while count and (part := self._block(count)):
            parts.append(part)
            count -= len(part)
            self._beat()
        return b"".join(parts)

    def _block(self, most: int) -> bytes:
        with self._reading():
            part = self._file.read(min(most, BLOCK))
        self.at += len(part)
        return part

    def pass_over(self, count: int) -> None:
        """Leave out so many bytes."""
        if self._seekable:
            self._file.seek(self.at + count)
            self.at += count
            return
        while count and (data := self.read(min(count, BLOCK))):
            count -= len(data)

    def line(self) -> bytes:
        """The next line with its end; of one of more than `MOST` bytes the beginning; empty at the end."""
        with self._reading():
            first = part = self._file.readline(MOST + 1)
            self.at += len(first)
            while len(part) > MOST and not part.endswith(b"\n"):
                part = self._file.readline(MOST + 1)
                self.at += len(part)
        return first

    def each_line(self) -> Iterator[bytes]:
        """All lines, as `line` gives them; then the file is closed."""
        with self:
            while raw := self.line():
                yield raw

    def lines(self, first: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """(place, line) of the lines that begin in [first, stop), which must not lie behind."""
        if first and self.stop != first:  # where the line before ends is not known
            self.pass_over(first - 1 - self.at)
            self.line()
        while (place := self.at) < stop and (raw := self.line()):
            yield place, raw
        self.stop = stop

    def reaches(self, first: int) -> bool:
        """Whether the lines from a place on can still be read."""
        return self.stop == first or self.at < first

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except UsageError:
            raise
        except (OSError, EOFError, zlib.error, ValueError) as error:
            raise FileError(f"{shown(self.path)}: cannot be read: {shown(reason(error), 120)}") from None


def length_of(path: Path, beat: Callable[[], object]) -> int:
    """How many bytes a packed file unpacks to; calls `beat` from time to time."""
    with TextStream(path, beat) as stream:
        while stream.read(BLOCK):
            pass
        return stream.at


def line_number(path: Path, place: int) -> int:
    """The number, from 1, of the line that begins at a place; reads all before it."""
    found = 1
    with TextStream(path) as stream:
        while data := stream.read(min(BLOCK, place - stream.at)):
            found += data.count(b"\n")
    return found
