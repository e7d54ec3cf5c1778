"""Which files of `--data` are read as text, and what is said of the others.

A file of a folder that is no text is left out and counted; one that was named is refused, with a remedy.
Where the user asks for bytes (`--tokenizer byte`), named files are taken as they are. Of Python's own
library, which nobody has named, all is text.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from zero_mpi.data.file_kinds import BINARY, is_utf8, kind_of
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import shown

SHOWN_LETTERS = 60  # letters of a name that are shown
SHOWN_NAMES = 3  # names


class TextFilter:
    """Looks at one file after the other; `notes` say what was found: `out`, `taken` and `odd`.

    paths       what was named: files and folders
    any_bytes   whether named files are taken as they are, whatever they look like
    flag        what the paths were named by
    """

    def __init__(self, paths: Sequence[str], any_bytes: bool, flag: str = "--data") -> None:
        self._flag = flag
        self._named, self._any_bytes = {os.path.realpath(path) for path in paths}, any_bytes
        self.out, self.taken, self.odd = list[str](), list[str](), list[str]()

    def takes(self, name: str, path: Path, head: bytes) -> bool:
        """Whether a file is read, by its first bytes. Raises UsageError for a named one that is no text."""
        kind = kind_of(head, name) if self._named else BINARY if b"\0" in head else None
        if kind is None:
            return True
        about = f"{shown(name, SHOWN_LETTERS)}: {kind.name}"
        if os.path.realpath(path) not in self._named:
            self.out.append(about)
            return False
        if not self._any_bytes:
            raise UsageError(
                f"{self._flag} {shown(path)} looks like {kind.name}, which is no text: {kind.remedy} "
                "(--tokenizer byte would take its bytes as they are)"
            )
        self.taken.append(about)
        return True

    def read(self, name: str, data: bytes) -> None:
        """Take note of the encoding of a file that was read whole."""
        if self._named and not self._any_bytes and not is_utf8(data):
            self.odd.append(shown(name, SHOWN_LETTERS))

    def notes(self) -> Iterator[str]:
        """The notes: a line for each sort of thing that was found."""
        if self.out:
            yield f"files that are no text left out: {some(self.out)}"
        if self.taken:
            yield f"files that are no text, taken as they are for --tokenizer byte: {some(self.taken)}"
        if self.odd:
            yield (
                f"text that is not UTF-8, taken byte by byte: {some(self.odd)}; iconv -f ENCODING -t UTF-8 "
                "converts it"
            )


def some(found: Sequence[str]) -> str:
    """A text: how many there are, and the first of them."""
    return f"{len(found):,} ({', '.join(found[:SHOWN_NAMES])}{', ...' if len(found) > SHOWN_NAMES else ''})"
