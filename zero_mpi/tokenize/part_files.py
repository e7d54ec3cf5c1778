"""A part on disk: Megatron's pair of files, and behind them the record that both are complete.

A pair gets its names when it is on disk, its record after that. So whatever kills the writer, a part that has
a record is whole, and one that has none is written again, to the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from zero_mpi.checkpoint.folders import sync_folder
from zero_mpi.data.bin_tokens import MEGATRON_MOST, megatron_index
from zero_mpi.data.token_folder import UNFINISHED
from zero_mpi.errors import UsageError, naming
from zero_mpi.files.atomic import write_to_disk, write_whole
from zero_mpi.files.open import exists, open_in_place, read_file
from zero_mpi.files.parse import parse_json

BIN, IDX = ".bin", ".idx"
COUNTS = ("documents", "tokens", "text_bytes", "skipped")
DIGEST = "digest"  # of all else in a file of ours that a job believes


class PartWriter:
    """Writes the token file `name` of a folder, whose ids are of type `dtype`.

    One that is left before `finish` leaves nothing. OSError with the file's name, here and in every method.
    """

    def __init__(self, out: Path, name: str, dtype: np.dtype[Any]) -> None:
        self._out, self._name, self._dtype = out, name, dtype
        self._sizes, self._digest = array("i"), hashlib.sha256()
        self._file = open(self._aside(BIN), "wb", opener=open_in_place)  # noqa: SIM115 (closed by __exit__)

    def _aside(self, suffix: str) -> Path:
        """Where a file lies until it is on disk."""
        return self._out / UNFINISHED / f"{self._name}{suffix}"

    def add(self, name: str, ids: NDArray[np.integer[Any]]) -> None:
        """Append a document, called `name` where it is refused; an empty one is none."""
        if len(ids) > MEGATRON_MOST:
            raise UsageError(f"{name}: a document of {len(ids):,} tokens, at most {MEGATRON_MOST:,} fit")
        if len(ids):
            raw = np.ascontiguousarray(ids.astype(self._dtype, copy=False)).data.cast("B")
            with naming(self._aside(BIN)):
                self._file.write(raw)
            self._digest.update(raw)
            self._sizes.append(len(ids))

    def finish(self, about: dict[str, Any]) -> None:
        """Bring the pair to its place, and write the record with what is said `about` it."""
        with naming(self._aside(BIN)):
            self._file.flush()
            os.fsync(self._file.fileno())
        sizes = np.frombuffer(self._sizes, np.int32)
        index = megatron_index(sizes, self._dtype)
        tokens = int(sizes.sum(dtype=np.int64))
        made = {
            BIN: (tokens * self._dtype.itemsize, self._digest),
            IDX: (len(index), hashlib.sha256(index)),
        }
        files = [
            {"name": self._name + suffix, "bytes": size, "sha256": digest.hexdigest()}
            for suffix, (size, digest) in made.items()
        ]
        if len(sizes):
            with naming(self._aside(IDX)):
                write_to_disk(self._aside(IDX), index)
            for suffix in (BIN, IDX):
                os.replace(self._aside(suffix), self._out / f"{self._name}{suffix}")
            sync_folder(self._out)
        record = {"documents": len(sizes), "tokens": tokens, "files": files if len(sizes) else [], **about}
        write_whole(record_of(self._out, self._name), json.dumps(sealed(record)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # all that counts was flushed before
            self._file.close()
        for suffix in (BIN, IDX):
            with suppress(OSError):
                os.unlink(self._aside(suffix))


def sealed(table: dict[str, Any]) -> dict[str, Any]:
    """A table with its digest: one that was changed is another than its sealed self."""
    text = json.dumps({name: value for name, value in table.items() if name != DIGEST})
    return {**table, DIGEST: hashlib.sha256(text.encode()).hexdigest()}


def record_of(out: Path, name: str) -> Path:
    """Where the record of a part is."""
    return out / UNFINISHED / f"{name}.json"


def read_record(out: Path, name: str) -> dict[str, Any] | None:
    """What is known of a part that is complete; None where it is not."""
    path = record_of(out, name)
    if not exists(path):
        return None
    try:
        record: dict[str, Any] = parse_json(read_file(path))
        whole = sealed(record) == record and all(
            (out / each["name"]).stat().st_size == each["bytes"] for each in record["files"]
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return record if whole else None
