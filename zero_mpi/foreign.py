"""What others have written (files, names, values, flags): opened, parsed and shown with care.

Nothing of it is trusted. Only a regular file is opened, for a pipe would wait for ever and a device never
ends; no more is read than a bound; parsing ends in a value or in one kind of error, whatever the nesting and
the numbers; and what is shown of it is one line of bounded length in which nothing controls a terminal.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import tomllib
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader, FileIO
from typing import Any, BinaryIO

from zero_mpi.errors import UsageError

LONGEST = 200  # letters of a foreign text that are shown
LONGEST_LINE = 1800  # of what a command says on a line, beside its own name
MOST_JSON = 64 << 20  # bytes of a file that is read whole to be parsed
PIECE = 1 << 20  # bytes read at once: room for all that may come would cost as much where little comes
MOST_NESTED = 100  # levels of a value; what walks through it by calling itself must not come to an end
MOST_VALUES = 1 << 21  # values of a JSON text; each takes about 100 bytes of memory, one byte of text may do
MOST_LINE = 1 << 20  # bytes of a line of a file of lines
MOST_SKIPPED = 64 << 20  # bytes of longer lines that are passed over
LONG_WORD = re.compile(rf"\S{{{LONGEST + 1},}}")
PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+"""
LONG_KEY = re.compile(
    rf"""(?<![\w"'-]){PART}(?:\.[ \t]*+{PART}){{32}}""", re.ASCII
)  # of TOML: takes the square of its parts
LAYOUT = "\n\t\u200c\u200d"  # letters that do not print and belong to a text: joiners make words and emoji


class FileError(UsageError):
    """A file is not as it must be: file, expected, found."""


def shown(value: object, most: int = LONGEST) -> str:
    """A foreign text for one line: escaped where it does not print, its middle left out where it is long."""
    text = str(value) if isinstance(value, str | os.PathLike) else _repr(value)
    return cut(printable(cut(text, most)), most)  # escapes are longer than what they stand for


def cut(text: str, most: int) -> str:
    """A text of at most so many letters, its middle left out where it has more."""
    if len(text) <= most:
        return text
    half = (most - 3) // 2
    return f"{text[: most - 3 - half]}...{text[len(text) - half :]}"


def _repr(value: object) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # Python writes no number of thousands of digits
        return f"a value of type {type(value).__name__} that is too large to write"


def show(name: str, most: int = 80) -> str:
    """A name from a file, quoted, fit for one line of an error: escaped, and cut when long."""
    return printable(repr(name if len(name) <= most else name[: most - 3] + "..."))


def quoted(value: object, most: int = 80) -> str:
    """A value from a file for an error: a text as `show` has it, all else as Python writes it."""
    return show(value, most) if isinstance(value, str) else shown(value, most)


def printable(text: str, keep: str = "") -> str:
    """A text with what does not print (control letters, new lines, halves of pairs) as escapes.

    Letters of `keep` stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def readable(text: str) -> str:
    """A text of many lines, such as a sample, in which nothing controls a terminal; its layout stays."""
    if text.isprintable():
        return text
    return "".join(c if c in LAYOUT or unicodedata.category(c) == "Zs" else printable(c) for c in text)


def one_line(text: str) -> str:
    """What a command says, whatever it was made of: one line of bounded length, and so is each word in it.

    The net below all that is shown: who makes a text of foreign parts shows them by `shown`.
    """
    return shown(LONG_WORD.sub(lambda found: shown(found[0]), text), LONGEST_LINE)


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether something lies at a path; FileError where the system refuses to say, as for the next two."""
    return _mode(path) is not None


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether a regular file lies at a path, or a link to one; raises FileError."""
    return stat.S_ISREG(_mode(path) or 0)


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a folder lies at a path, or a link to one; raises FileError."""
    return stat.S_ISDIR(_mode(path) or 0)


def _mode(path: str | os.PathLike[str]) -> int | None:
    """What the system says of what lies at a path; None if nothing does."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise FileError(f"{shown(path)}: cannot be looked at: {reason(error)}") from None


def reason(error: Exception) -> str:
    """What the system says, without the path, which the caller shows in its own way."""
    return str(getattr(error, "strerror", None) or error)


@contextmanager
def refusing(what: str, path: str | os.PathLike[str], problem: str = "") -> Iterator[None]:
    """Turn an OSError of the body into a FileError: `what` (a flag) with path, problem and reason."""
    try:
        yield
    except OSError as error:
        about = f"{problem}: " if problem else ""
        raise FileError(f"{what} {shown(path)}: {about}{reason(error)}".lstrip()) from error


def check_target(what: str, path: str | os.PathLike[str], problem: str = "cannot be written") -> None:
    """Raise FileError, naming `what` (a flag), unless a file can be written at a path, for all we know."""
    folder, why = os.path.dirname(path) or ".", ""
    if is_folder(path):
        why = "it is a folder, expected the name of a file"
    elif exists(path):  # a file, or a device such as /dev/stdout, whose folder does not matter
        why = "" if os.access(path, os.W_OK) else "Permission denied"
    elif not is_folder(folder):
        why = f"{'Not a directory' if exists(folder) else 'No such file or directory'}: {shown(folder)}"
    elif not os.access(folder, os.W_OK | os.X_OK):
        why = f"Permission denied: {shown(folder)}"
    if why:
        raise FileError(f"{what} {shown(path)}: {problem}: {why}")


def open_file(path: str | os.PathLike[str], expected: str = "a file") -> FileIO:
    """Open a regular file, without a buffer, and nothing else; raises FileError.

    It is looked at after it was opened, without waiting for a pipe's other end: what a look before has seen
    may have been replaced.
    """
    try:
        real = os.path.realpath(path)  # the file that a link names now
        file = open(real, "rb", buffering=0, opener=_without_waiting)  # noqa: SIM115 (returned)
    except IsADirectoryError:
        raise FileError(f"{shown(path)}: expected {expected}, found a folder: name the file in it") from None
    except FileNotFoundError:
        raise FileError(f"{shown(path)}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise FileError(f"{shown(path)}: cannot be read: {reason(error)}") from None
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise FileError(f"{shown(path)}: expected {expected}, found a device or pipe")


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def read_file(path: str | os.PathLike[str], most: int = MOST_JSON, expected: str = "a file") -> bytes:
    """All bytes of a regular file of at most `most` bytes; raises FileError."""
    with open_file(path, expected) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise FileError(f"{shown(path)}: expected {expected} of at most {most} bytes, found more")
        try:
            parts, room = [], most + 1
            while room and (part := file.read(min(room, PIECE))):
                parts.append(part)
                room -= len(part)
        except OSError as error:
            raise FileError(f"{shown(path)}: cannot be read: {error.strerror}") from None
    if not room:
        raise FileError(f"{shown(path)}: expected {expected} of at most {most} bytes, found more")
    return b"".join(parts)


def read_lines(path: str | os.PathLike[str], expected: str = "a file of lines") -> Iterator[bytes]:
    """The lines of a regular file with their ends, in bounded memory; raises FileError.

    A line longer than MOST_LINE is passed over, for a crash may have left a stretch of zeros; where these
    are very long the file is none of lines.
    """
    with BufferedReader(open_file(path, expected), 1 << 18) as file:
        try:
            yield from _lines(file)
        except OSError as error:
            raise FileError(f"{shown(path)}: cannot be read: {error.strerror}") from None
        except ValueError:
            raise FileError(
                f"{shown(path)}: expected {expected} of at most {MOST_LINE} bytes each, found longer ones"
            ) from None


def _lines(file: BinaryIO) -> Iterator[bytes]:
    skipped = 0
    while line := file.readline(MOST_LINE):
        whole = len(line) < MOST_LINE or line.endswith(b"\n")
        while not whole:
            skipped += len(line)
            line = file.readline(MOST_LINE)
            whole = len(line) < MOST_LINE or line.endswith(b"\n")
            if skipped > MOST_SKIPPED:
                raise ValueError(skipped)
            if whole:
                line = b""
        if line:
            yield line


def parse_json(
    raw: bytes | str,
    *,
    null_for_infinite: bool = False,
    unique: bool = False,
    most_values: int = MOST_VALUES,
) -> Any:
    """The JSON value of a text in UTF-8; ValueError of one line for anything else.

    That is also for nesting without end, numbers of thousands of digits, more than `most_values` values, and
    numbers that are not finite, which JSON does not have; `null_for_infinite` takes these as null. `unique`:
    also for a name that an object has twice, of which the last would count.
    """
    if _values(raw) > most_values:
        raise ValueError(f"more than {most_values} values")

    def number(text: str) -> float | None:
        value = float(text)
        if not math.isfinite(value):
            constant(text)
            return None
        return value

    def constant(text: str) -> None:
        if not null_for_infinite:
            raise ValueError(f"the number {shown(text, 40)} is not finite")

    return _parsed(
        lambda: json.loads(
            raw if isinstance(raw, str) else raw.decode(),
            parse_float=number,
            parse_constant=constant,
            object_pairs_hook=_unique if unique else None,
        )
    )


def _is_nested(value: Any, levels: int) -> bool:
    """Whether lists and tables are in one another more than so many levels deep."""
    inner = [value]
    for _ in range(levels + 1):
        inner = [
            item
            for outer in inner
            if isinstance(outer, dict | list)
            for item in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(item, dict | list)
        ]
    return bool(inner)


def _values(raw: bytes | str) -> int:
    """At least as many values as a JSON text has: signs in texts count as well."""
    signs = ",[{"
    return 1 + sum(raw.count(c) if isinstance(raw, str) else raw.count(c.encode()) for c in signs)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise ValueError(f"expected {show(twice)} once, found it twice")
    return found


def parse_toml(raw: bytes) -> dict[str, Any]:
    """The table of a TOML text in UTF-8; ValueError of one line for anything else."""

    def parse() -> dict[str, Any]:
        text = raw.decode()
        if LONG_KEY.search(text):
            raise ValueError("a key of more than 32 parts")
        return tomllib.loads(text)

    table: dict[str, Any] = _parsed(parse)
    return table


def _parsed(parse: Callable[[], Any]) -> Any:
    try:
        value = parse()
        if _is_nested(value, MOST_NESTED):
            raise RecursionError
        return value
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except ValueError as error:  # of the format; of a number with thousands of digits
        raise ValueError(shown(str(error))) from None
