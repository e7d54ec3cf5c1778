"""Reads the rows of conversation files as lines of JSON, from text lines, a JSON document or a table.

Lines and documents may be compressed (.gz, .zst). Only a JSON document, of limited size, is read as a whole.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from zero_mpi.errors import FileError, UsageError, import_optional
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import open_file, reason
from zero_mpi.files.parse import parse_json
from zero_mpi.files.text_streams import BOM, MOST, TextStream, packing_of

DOCUMENT, ARROW = ".json", ".arrow"  # suffixes
TABLES = {ARROW: "Arrow", ".parquet": "Parquet"}
COLUMNS = frozenset(("messages", "conversations", "prompt", "completion", "instruction", "output", "input"))
COLUMNS |= {"chosen", "rejected", "label", "system", "tools"}
HEAD = 1 << 16  # the first row of a file must begin within these bytes, so that its form is recognized
ROWS = 64  # rows of a table that are converted together
COLUMN = "input_ids"  # column of token ids


def pyarrow(user: str = "Arrow files") -> Any:
    """Return the package pyarrow, which `user` needs. If it is missing, UsageError says how to install it."""
    return import_optional(user, "arrow", "pyarrow", "pyarrow.ipc")[0]


@contextmanager
def open_table(path: Path, kind: str = "Parquet") -> Iterator[Any]:
    """Yield an open ParquetFile or ArrowFile. Raise FileError if the file is damaged."""
    library, parquet = pyarrow(f"{kind} files"), import_module("pyarrow.parquet")
    with open_file(path, f"a file of {kind}") as raw:
        try:
            file = library.PythonFile(raw, mode="r")
            yield parquet.ParquetFile(file) if kind == "Parquet" else ArrowFile(library, file)
        except UsageError:
            raise
        except (OSError, ValueError, library.lib.ArrowException) as error:
            raise FileError(f"{shown(path)}: cannot be read as {kind}: {shown(reason(error), 120)}") from None


class ArrowFile:
    """An Arrow file or stream, with names as in ParquetFile. The package datasets writes both kinds."""

    def __init__(self, library: Any, file: Any) -> None:
        if file.read(6) == b"ARROW1":
            reader = library.ipc.open_file(file)
            self.batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            file.seek(0)
            self.batches = reader = library.ipc.open_stream(file)
        self.schema_arrow = reader.schema

    def iter_batches(self, _: int, columns: list[str]) -> Iterator[Any]:
        return (batch.select(columns) for batch in self.batches)


def suffix_of(path: Path) -> str:
    """Return the suffix of a file name; a suffix such as .gz is removed first."""
    return (path.with_suffix("") if packing_of(path.name) else path).suffix.lower()


def beginning(path: Path, is_enough: Callable[[bytes], object]) -> bytes:
    """Return the first `HEAD` bytes of a file. If they are not enough, add the rest of the last line."""
    with TextStream(path) as stream:
        head = stream.read(HEAD)
        return head if is_enough(head) else head + stream.read(MOST).partition(b"\n")[0]


def columns_of(path: Path) -> list[str]:
    """Return a table's columns that conversations may use; an Arrow file of tokens has none of them."""
    suffix = suffix_of(path)
    with open_table(path, TABLES[suffix]) as table:
        names = table.schema_arrow.names
    holds_tokens = suffix == ARROW and COLUMN in names
    return [] if holds_tokens else [name for name in names if name in COLUMNS]


def rows_of(path: Path) -> tuple[str, Iterable[bytes]]:
    """Return the name of a row ("line" or "row") and all rows as JSON. Raise FileError for a damaged file."""
    suffix = suffix_of(path)
    rows = _table(path) if suffix in TABLES else _document(path) if suffix == DOCUMENT else None
    return ("line", TextStream(path).all_lines()) if rows is None else ("row", map(_as_json, rows))


def _table(path: Path) -> Iterator[Any]:
    columns = columns_of(path)
    with open_table(path, TABLES[suffix_of(path)]) as table:
        for batch in table.iter_batches(ROWS, columns=columns):
            batch.validate(full=True)  # opening an Arrow file does not check its content
            for start in range(0, batch.num_rows, ROWS):
                yield from map(_without_nulls, batch.slice(start, ROWS).to_pylist())


def _without_nulls(value: Any) -> Any:
    """Return a value of a table without keys whose value is null: each row of a table has all keys."""
    if isinstance(value, list | tuple):
        return list(map(_without_nulls, value))
    if not isinstance(value, dict):
        return value
    return {key: _without_nulls(child) for key, child in value.items() if child is not None}


def _document(path: Path) -> list[Any] | None:
    """Return the rows of a JSON document (an array, `{"data": array}` or one object); None for JSON lines."""
    with TextStream(path) as stream:
        raw = stream.read(MOST + 1)
    if len(raw) > MOST:
        raise FileError(f"{shown(path)}: expected a JSON document of at most {MOST} bytes, found more")
    try:
        document = parse_json(raw.removeprefix(BOM), unique=True)
    except ValueError:
        return None
    rows = document.get("data", [document]) if isinstance(document, dict) else document
    return rows if isinstance(rows, list) else [document]


def _as_json(row: Any) -> bytes:
    """Return a row as a JSON line. Types that JSON lacks become text, but bytes become {}."""
    text = json.dumps(row, ensure_ascii=False, default=lambda x: {} if isinstance(x, bytes) else str(x))
    return text.encode("utf-8", "surrogatepass")
