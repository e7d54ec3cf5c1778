"""What a copy in shared memory is: of which step, whose slices, and which runs of tensors in which order.

A record is a line with its own checksum and an object as JSON. It holds what a checkpoint's keys say of the
progress, and the head of the chain over the run's records (`telemetry.proof`) at that step: a copy whose head
is not in the chain of the folder is of another history.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from zero_mpi.checkpoint.best import Best
from zero_mpi.checkpoint.copy_file import RECORD
from zero_mpi.checkpoint.state import TrainingProgress
from zero_mpi.errors import FileError, UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import read_file
from zero_mpi.files.parse import parse_json

ELEMENT = 4  # bytes
MOST_BYTES = 1 << 28  # of a record
MOST = 1 << 52  # of a count
Run = tuple[str, str, int, int]  # role of the file it is of, name of the tensor, first element, how many


@dataclass(frozen=True)
class CopyRecord:
    """What a copy says of itself; machine, plan: as in `Description`, for notes on what has changed."""

    job: str
    rank: int
    ranks: int
    progress: TrainingProgress
    chain: str
    digest: str
    runs: tuple[Run, ...]
    machine: Mapping[str, Any]
    plan: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return ELEMENT * sum(size for *_, size in self.runs)

    def packed(self) -> bytes:
        """The content of its file."""
        said = {name: getattr(self, name) for name in self.__dataclass_fields__}
        progress = {name: value for name, value in asdict(self.progress).items() if value is not None}
        best = self.progress.best
        said["progress"] = progress | {"best": [float(best.loss).hex(), best.step, best.since]}
        body = json.dumps(said, default=dict).encode()
        return f"{xxh3_128_hexdigest(body)}\n".encode() + body


def read_record(path: Path) -> CopyRecord:
    """The record in a file; raises UsageError unless it is the one that was written."""
    raw = read_file(path, MOST_BYTES)
    line, _, body = raw.partition(b"\n")
    if line != xxh3_128_hexdigest(body).encode():
        raise FileError(f"{shown(path)}: is not the record that was written (its checksum differs)")
    try:
        return unpacked(parse_json(body))
    except (ValueError, KeyError, TypeError, OverflowError):
        raise FileError(f"{shown(path)}: is no record of a copy") from None


def unpacked(said: Any) -> CopyRecord:
    """The record that an object stands for; ValueError, KeyError or TypeError for any other."""
    given = dict(said["progress"])
    loss, step, since = given.pop("best")
    counts: dict[str, Any] = {name: count(value) for name, value in given.items()}
    progress = TrainingProgress(**counts, best=Best(float.fromhex(loss), count(step), count(since)))
    runs = tuple((text(role), text(name), count(at), count(size)) for role, name, at, size in said["runs"])
    ranks = count(said["ranks"])
    if not count(said["rank"]) < ranks:
        raise ValueError("a rank of none")
    words = [text(said[name]) for name in ("job", "chain", "digest")]
    about = [dict(said[name]) for name in ("machine", "plan")]
    return CopyRecord(words[0], said["rank"], ranks, progress, words[1], words[2], runs, about[0], about[1])


def count(value: Any) -> int:
    """A whole number from 0 on; ValueError for anything else."""
    if type(value) is not int or not 0 <= value < MOST:
        raise ValueError("expected a count")
    return value


def text(value: Any) -> str:
    """A text; ValueError for anything else."""
    if type(value) is not str:
        raise ValueError("expected a text")
    return value


def elements_of(record: Path) -> Path:
    """The file of elements that a record stands beside."""
    return record.with_name(record.name.removesuffix(RECORD))


def look(record: Path) -> CopyRecord:
    """The record of a copy whose elements may be there; raises UsageError where they cannot be."""
    found, place = read_record(record), elements_of(record)
    try:
        nbytes = os.lstat(place).st_size
    except OSError:
        nbytes = -1
    if nbytes != found.nbytes:
        raise UsageError(f"{shown(place)}: expected {found.nbytes} bytes, found {max(nbytes, 0)}")
    return found
