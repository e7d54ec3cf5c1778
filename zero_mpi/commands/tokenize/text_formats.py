"""Formats of text that can be tokenized; the end of a file's name tells its format.

A format gives the weights of a file's pieces, by which work is dealt out, and the texts between two places.
A new format is a row of `TEXT_FORMATS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from zero_mpi.data.conversations.row_sources import open_table
from zero_mpi.data.document_reader import Text
from zero_mpi.data.text_files import HEAD, TextFilter
from zero_mpi.data.token_formats import MEGATRON_MOST
from zero_mpi.errors import FileError, JobError
from zero_mpi.files.foreign import quoted, shown
from zero_mpi.files.parse import parse_json
from zero_mpi.files.text_streams import (
    MOST,
    MOST_UNPACKED,
    TextStream,
    is_text,
    length_of,
    line_number,
    packing_of,
)

FLAG = "TEXT"  # names the inputs in messages
ROWS = 256  # rows of Parquet that are read together
DENSEST, ALWAYS = 50, 8 << 20  # most bytes of an unpacked text: per byte of the packed file; in any case


@dataclass(frozen=True)
class InputFile:
    """File to read: its name among the inputs, its path, and the name of its format."""

    name: str
    path: Path
    format: str
    size: int  # bytes when it was looked at
    changed_at: int  # nanoseconds of its last change then


def check_unchanged(file: InputFile) -> None:
    """Raise JobError for a file that is not as it was when the job began."""
    try:
        about = file.path.stat()
    except OSError as error:
        raise JobError(f"{shown(file.path)}: {error.strerror}; it existed when the job started") from None
    if (about.st_size, about.st_mtime_ns) != (file.size, file.changed_at):
        raise JobError(f"{shown(file.path)} changed while it was read: start again when it no longer changes")


class Reading:
    """Settings by which texts are read, and findings: for one part, or one look at files.

    field       the field of a line or row that is the text
    skips       whether lines and rows in error are left out, and counted in `skipped`
    filter      decides which files are text, and notes those that are read as such
    beat        is called at each block of a file that is read
    """

    def __init__(self, field: str, skips: bool, text_filter: TextFilter) -> None:
        self.field, self.skips, self.filter = field, skips, text_filter
        self.skipped = 0
        self.beat: Callable[[], object] = lambda: None
        self._stream: TextStream | None = None

    def stream(self, path: Path, first: int) -> TextStream:
        """Return the stream of a file, where it was left if that lies before `first`."""
        kept = self._stream
        if kept is None or kept.path != path or not kept.reaches(first):
            self.close()
            kept = self._stream = TextStream(path, self.beat)
        return kept

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def bad(self, path: Path, place: str, number: Callable[[], int], problem: object) -> None:
        """Raise FileError for a line or row in error, or count it."""
        if not self.skips:
            where = f"{shown(path)}, {place} {number():,}"
            raise FileError(f"{where}: {problem}; --skip-bad skips such lines and rows") from None
        self.skipped += 1

    def text_of(self, value: Any) -> bytes:
        """Return the text of a line's value; ValueError for one that has none."""
        if not isinstance(value, dict):
            raise ValueError(f"expected an object with {quoted(self.field)}, found {quoted(value)}")
        if self.field not in value:
            found = ", ".join(quoted(name, 40) for name in list(value)[:5]) or "nothing"
            raise ValueError(f"expected the field {quoted(self.field)}, found {found}; name it with --field")
        if not is_text(value[self.field]):
            raise ValueError(f"{self.field}: expected a text, found {quoted(value[self.field])}")
        text: str = value[self.field]
        return text.encode()


class TextFormat(NamedTuple):
    """Format of text."""

    name: str
    suffixes: tuple[str, ...]  # of its files, without that of a packing
    # Bytes of text, or nearly: of the file or each row group; None: the file is left out.
    weights: Callable[[InputFile, Reading], list[int] | None]
    texts: Callable[[InputFile, int, int, Reading], Iterator[Text]]  # of a file between two places
    divisible: bool = False  # whether places are bytes; if not, they are numbers of weights


def _length(file: InputFile, reading: Reading) -> list[int] | None:
    if file.format == TEXT.name:
        with TextStream(file.path) as stream:
            if not reading.filter.takes(unpacked_name(file.name), file.path, stream.read(HEAD)):
                return None
    return [file.size if not packing_of(file.path.name) else length_of(file.path, reading.beat)]


def _whole(file: InputFile, first: int, stop: int, reading: Reading) -> Iterator[Text]:
    packed = packing_of(file.path.name)
    most = min(MOST_UNPACKED, max(ALWAYS, DENSEST * file.size)) if packed else MEGATRON_MOST
    with TextStream(file.path, reading.beat) as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise FileError(
            f"{shown(file.path)}: expected a text (one document) of at most {most:,} bytes, found more: "
            "split it, or write one document per line as JSON Lines"
        )
    reading.filter.read(file.name, data)
    yield file.name, data


def _lines(file: InputFile, first: int, stop: int, reading: Reading) -> Iterator[Text]:
    for place, raw in reading.stream(file.path, first).lines(first, stop):
        if not raw.strip():
            continue
        try:
            if len(raw) > MOST:
                raise ValueError(f"expected at most {MOST:,} bytes, found more")
            text = reading.text_of(parse_json(raw))
        except ValueError as error:
            reading.bad(file.path, "line", partial(line_number, file.path, place), error)
        else:
            yield f"{file.name}@{place}", text


def _group_weights(file: InputFile, reading: Reading) -> list[int]:
    with open_table(file.path) as found:
        names, where = found.schema_arrow.names, shown(file.path)
        if reading.field not in names:
            others = shown(", ".join(names), 100) or "none"
            column = f"expected a column {quoted(reading.field)}, found {others}"
            raise FileError(f"{where}: {column}; name it with --field")
        kind = str(found.schema_arrow.field(reading.field).type)
        if kind not in ("string", "large_string"):
            texts = f"expected a column of texts, found {shown(kind, 60)}"
            raise FileError(f"{where}: {reading.field}: {texts}")
        weights = []
        for group in map(found.metadata.row_group, range(found.metadata.num_row_groups)):
            columns = map(group.column, range(group.num_columns))
            sizes = [each.total_uncompressed_size for each in columns if each.path_in_schema == reading.field]
            weights.append(sum(max(size, 0) for size in sizes))
        return weights


def _rows(file: InputFile, first: int, stop: int, reading: Reading) -> Iterator[Text]:
    with open_table(file.path) as found:
        row = sum(found.metadata.row_group(number).num_rows for number in range(first))
        groups = list(range(first, stop))
        for batch in found.iter_batches(batch_size=ROWS, row_groups=groups, columns=[reading.field]):
            for value in batch.column(0).to_pylist():
                row += 1
                if is_text(value):
                    yield f"{file.name}@{row}", value.encode()
                else:
                    problem = f"{reading.field}: expected a text, found {quoted(value)}"
                    reading.bad(file.path, "row", partial(int, row), problem)


JSON_LINES = TextFormat("JSON Lines", (".jsonl", ".ndjson"), _length, _lines, divisible=True)
PARQUET = TextFormat("Parquet", (".parquet",), _group_weights, _rows)
TEXT = TextFormat("text", ("",), _length, _whole)
TEXT_FORMATS = {each.name: each for each in (JSON_LINES, PARQUET, TEXT)}  # the first match is used


def unpacked_name(name: str) -> str:
    """Return a file's name without its compression suffix."""
    return name[: len(name) - len(packing_of(name))]


def format_named(name: str) -> TextFormat:
    """Return the format of a file of such a name; text unless another one is known by it."""
    inner = unpacked_name(name).lower()
    found = next(each for each in TEXT_FORMATS.values() if inner.endswith(each.suffixes))
    return TEXT if found is PARQUET and inner != name.lower() else found  # Parquet compresses by itself
