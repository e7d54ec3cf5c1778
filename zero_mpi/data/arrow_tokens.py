"""Parquet and Arrow tables, and token ids in Arrow files of the datasets package: one list per document.

pyarrow tells where the uncompressed buffers lie; the ids are read like those of any other token file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zero_mpi.data.token_file import TokenLayout
from zero_mpi.errors import FileError, UsageError, import_optional
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import open_file, reason

COLUMN = "input_ids"
KINDS = ("int16", "int32", "int64", "uint16", "uint32")


def pyarrow(what: str = "Arrow files") -> Any:
    """Return the package pyarrow, for files of a kind. Raises UsageError with the remedy if it is missing."""
    return import_optional(what, "arrow", "pyarrow", "pyarrow.ipc")[0]


@contextmanager
def open_table(path: Path, kind: str = "Parquet") -> Iterator[Any]:
    """Open a Parquet file, or columns and batches of an Arrow file; raises FileError for any failure."""
    library, parquet = pyarrow(f"{kind} files"), import_module("pyarrow.parquet")
    with open_file(path, f"a file of {kind}") as raw:
        try:
            file = library.PythonFile(raw, mode="r")
            yield parquet.ParquetFile(file) if kind == "Parquet" else _batches(library, file)
        except UsageError:
            raise
        except (OSError, ValueError, library.lib.ArrowException) as error:
            raise FileError(f"{shown(path)}: cannot be read as {kind}: {shown(reason(error), 120)}") from None


def arrow_layout(path: Path, file: FileIO) -> TokenLayout:
    """Return where the column of ids lies; ValueError if the file has none that can be read by position."""
    library = pyarrow()
    try:
        with library.memory_map(str(path)) as mapped:
            batches = list(_batches(library, mapped)[1])
            return _layout(library, mapped, batches)
    except library.lib.ArrowException as error:
        raise ValueError(shown(str(error), 200)) from None


def _batches(library: Any, file: Any) -> tuple[list[str], Iterator[Any]]:
    """Return the columns and record batches of a file or a stream; datasets writes streams."""
    if file.read(6) == b"ARROW1":
        found = library.ipc.open_file(file)
        return found.schema.names, map(found.get_batch, range(found.num_record_batches))
    file.seek(0)
    stream = library.ipc.open_stream(file)
    return stream.schema.names, iter(stream)


def _layout(library: Any, mapped: Any, batches: list[Any]) -> TokenLayout:
    mapped.seek(0)
    base = mapped.read_buffer(mapped.size()).address
    runs, ends, kinds, total = list[tuple[int, int]](), list[NDArray[np.int64]](), set[str](), 0
    for batch in batches:
        column = _column(library, batch)
        kinds.add(str(column.type.value_type))
        offsets = column.offsets.to_numpy().astype(np.int64)
        values = column.values
        width = values.type.bit_width // 8
        start = values.buffers()[1].address - base + (values.offset + int(offsets[0])) * width
        count = int(offsets[-1] - offsets[0])
        if not 0 <= start <= mapped.size() - count * width:
            raise ValueError("expected uncompressed buffers, found compressed ones")
        runs.append((start, count))
        ends.append(offsets[1:] - offsets[0] + total)
        total += count
    if not batches:
        raise ValueError("expected at least one batch of rows, found none")
    if len(kinds) != 1 or not kinds <= set(KINDS):
        raise ValueError(f"expected ids of one type, {', '.join(KINDS)}, found {', '.join(sorted(kinds))}")
    return TokenLayout(runs, np.dtype(kinds.pop()).newbyteorder("<"), np.concatenate(ends))


def _column(library: Any, batch: Any) -> Any:
    names = batch.schema.names
    if COLUMN not in names:
        raise ValueError(f"expected a column {COLUMN}, found {shown(', '.join(names), 100)}")
    column = batch.column(names.index(COLUMN))
    column.validate(full=True)  # the file's content was not checked before
    kind = column.type
    if not (library.types.is_list(kind) or library.types.is_large_list(kind)) or column.null_count:
        raise ValueError(f"expected a list of ids in each row of {COLUMN}, found {shown(str(kind), 60)}")
    if column.values.null_count:
        raise ValueError(f"expected an id at each position of {COLUMN}, found missing ones")
    return column
