"""The values of a large JSON object one after the other, so that memory does not grow with the file.

A time line is one object with a list of very many events. Text is unpacked and decoded in pieces; each value,
and each item of the list, is parsed by itself and must end within a bound. Of a packed file no more is taken
than such files can hold: what packs better by far is a bomb.
"""

from __future__ import annotations

import codecs
import json
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
BLANKS = " \t\n\r"


class PackingError(ValueError):
    """A packed file is broken, or unpacks to far more than a time line would."""


class Text:
    """A text that is read as far as it is needed: `rest` begins at `at`. Raises ValueError."""

    def __init__(self, pieces: Iterator[str]) -> None:
        self._pieces, self._text, self._at = pieces, "", 0
        self._decoder = json.JSONDecoder()

    def _more(self) -> bool:
        """Whether there was more to read."""
        piece = next(self._pieces, "")
        self._text, self._at = self._text[self._at :] + piece, 0
        return bool(piece)

    def peek(self) -> str:
        """The next letter that is no blank; "" at the end."""
        passed = 0
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in BLANKS:
                    return self._text[self._at]
                self._at += 1
                passed += 1
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
                found, end = self._decoder.raw_decode(self._text, self._at)
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


def members(path: Path) -> Iterator[tuple[str, Any]]:
    """(name, value) of an object's members; of a list, an iterator of its items. FileError, ValueError."""
    with open_file(path, "a time line") as file:
        text = Text(decoded(unpacked(file)))
        if text.peek() != "{":
            raise ValueError("it has no traceEvents")
        text.take("{")
        more = text.peek() != "}"
        while more:
            name = text.value()
            if not isinstance(name, str):
                raise ValueError("a name that is no text")
            text.take(":")
            if text.peek() == "[":
                yield name, (rest := items(text))
                for _ in rest:  # that nobody wanted
                    pass
            else:
                yield name, text.value()
            more = text.take(",}") == ","
        if text.peek():
            raise ValueError("more than one value")


def items(text: Text) -> Iterator[Any]:
    """The items of a list."""
    text.take("[")
    more = text.peek() != "]"
    if not more:
        text.take("]")
    while more:
        yield text.value()
        more = text.take(",]") == ","


def decoded(pieces: Iterator[bytes]) -> Iterator[str]:
    """Pieces of UTF-8 as text."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for piece in pieces:
        text = decoder.decode(piece)
        if text:
            yield text
    decoder.decode(b"", final=True)


def unpacked(file: FileIO) -> Iterator[bytes]:
    """The bytes of a file, without gzip's packing where it has it. PackingError where that is no good."""
    head = file.read(len(GZIP))
    file.seek(0)
    return inflated(file) if head == GZIP else iter(lambda: file.read(PIECE), b"")


def inflated(file: FileIO) -> Iterator[bytes]:
    """What is packed; gzip's own reader would look through any number of zeros behind it."""
    stream, packed, taken = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16), 0, 0
    while not stream.eof:
        raw = stream.unconsumed_tail
        if not raw:
            raw = file.read(PIECE)
            packed += len(raw)
        try:
            piece = stream.decompress(raw, PIECE)
        except zlib.error as error:
            raise PackingError(f"it cannot be unpacked: {error}") from None
        if not raw and not piece:
            raise PackingError("it cannot be unpacked: it ends too early")
        taken += len(piece)
        if taken > max(ALWAYS, DENSEST * packed):
            raise PackingError(f"it unpacks to more than {DENSEST} times its size")
        if piece:
            yield piece
