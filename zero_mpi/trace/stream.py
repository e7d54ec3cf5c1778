"""The values of a large JSON object one after the other, so that memory does not grow with the file.

A time line is one object with a list of very many events. Text is unpacked and decoded in pieces; each value,
and each item of the list, is parsed by itself and must end within a bound. Of a packed file no more is taken
than such files can hold: what packs better by far is a bomb.
"""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from zero_mpi.files.open import open_file

GZIP = b"\x1f\x8b"
PIECE = 1 << 18  # bytes that are read at a time
MOST_VALUE = 1 << 20  # letters of a value
DENSEST, ALWAYS = 50, 8 << 20  # bytes that a packed file may unpack to: for each of its own; in any case
AHEAD = 4  # letters behind a number that could belong to it, and one more: e+ and .
BLANKS = re.compile(r"[ \t\n\r]*")
DECODER = json.JSONDecoder()


class BrokenError(ValueError):
    """A file is no time line that can be read, for a reason that says all."""


class Text:
    """A text that is read as far as it is needed: `rest` begins at `at`. Raises ValueError."""

    def __init__(self, pieces: Iterator[str]) -> None:
        self._pieces, self._text, self._at = pieces, "", 0

    def _more(self) -> bool:
        """Whether there was more to read."""
        piece = next(self._pieces, "")
        self._text, self._at = self._text[self._at :] + piece, 0
        return bool(piece)

    def peek(self) -> str:
        """The next letter that is no blank; "" at the end."""
        passed = 0
        while True:
            start, self._at = self._at, BLANKS.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            passed += self._at - start
            if passed > MOST_VALUE:
                raise ValueError("it is made of blanks")
            if not self._more():
                return ""

    def take(self, wanted: str) -> str:
        """The next letter, which must be one of `wanted`."""
        found = self.peek()
        if not found or found not in wanted:
            raise ValueError(f"expected {' or '.join(wanted)}, found {found or 'the end'}")
        self._at += 1
        return found

    def value(self) -> Any:
        """The next value of JSON."""
        self.peek()
        while True:
            try:
                found, end = DECODER.raw_decode(self._text, self._at)
            except RecursionError:
                raise ValueError("nested too deeply") from None
            except json.JSONDecodeError:
                if len(self._text) - self._at > MOST_VALUE or not self._more():
                    raise ValueError("a value that is no JSON") from None
                continue
            left = len(self._text) - end
            if left < AHEAD and self._more():
                continue  # a number may go on in the next piece
            self._at = len(self._text) - left
            return found

    def inside(self, ends: str) -> Iterator[None]:
        """Come to each member of what is between two letters, [] or {}; who is told reads it."""
        self.take(ends[0])
        if self.peek() == ends[1]:
            self.take(ends[1])
            return
        yield
        while self.take(f",{ends[1]}") == ",":
            yield


def members(path: Path) -> Iterator[tuple[str, Any]]:
    """(name, value) of an object's members; of a list, an iterator of its items. FileError, ValueError."""
    with open_file(path, "a time line") as file:
        text = Text(codecs.iterdecode(unpacked(file), "utf-8"))
        if text.peek() != "{":
            raise ValueError("it has no traceEvents")
        for _ in text.inside("{}"):
            name = text.value()
            if not isinstance(name, str):
                raise ValueError("a name that is no text")
            text.take(":")
            if text.peek() == "[":
                yield name, (rest := (text.value() for _ in text.inside("[]")))
                for _ in rest:  # that nobody wanted
                    pass
            else:
                yield name, text.value()
        if text.peek():
            raise ValueError("more than one value")


def unpacked(file: FileIO) -> Iterator[bytes]:
    """The bytes of a file, without gzip's packing where it has it. BrokenError where that is no good."""
    head = file.read(len(GZIP))
    file.seek(0)
    return inflated(file) if head == GZIP else iter(lambda: file.read(PIECE), b"")


def inflated(file: FileIO) -> Iterator[bytes]:
    """What is packed; gzip's own reader would look through any number of zeros behind it."""
    stream, packed, taken = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16), 0, 0
    while not stream.eof:
        raw = stream.unconsumed_tail or file.read(PIECE)
        packed += 0 if stream.unconsumed_tail else len(raw)
        try:
            piece = stream.decompress(raw, PIECE)
        except zlib.error as error:
            raise BrokenError(f"broken, it cannot be unpacked: {error}") from None
        if not raw and not piece:
            raise BrokenError("broken, it cannot be unpacked: it ends too early")
        taken += len(piece)
        if taken > max(ALWAYS, DENSEST * packed):
            raise BrokenError(f"broken, it unpacks to more than {DENSEST} times its size")
        yield piece
