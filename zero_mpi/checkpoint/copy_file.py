"""A copy of a rank's slices in shared memory: a file of float32 elements, run after run of tensors.

    /dev/shm/zero_mpi-copy-RUN-JOB-RANK-NODE-SLOT          the elements
    /dev/shm/zero_mpi-copy-RUN-JOB-RANK-NODE-SLOT.record   what they are (`checkpoint.copy_record`)

RANK is whose slices they are, NODE who keeps them, SLOT 0 or 1. The record goes before elements change and
comes back after them, so a file with a record is whole, whatever killed the writer. The room is taken when a
file is made: writing never finds it gone. A file is read and written by calls, not mapped, for a mapping of a
file that somebody cuts short ends the process.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from xxhash import xxh3_128

from zero_mpi.device.types import Array
from zero_mpi.errors import FileError, UsageError, naming
from zero_mpi.files.atomic import write_whole
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import fill, reason
from zero_mpi.launch.leftovers import PLACE

PREFIX, RECORD = "zero_mpi-copy-", ".record"
NAME = re.compile(rf"\.?{PREFIX}([0-9a-f]+)-([0-9a-f]+)-([0-9]+)-([0-9]+)-([01])(\.record(\.partial)?)?")
PIECE = 1 << 23  # bytes that are moved at once
SLOTS = 2  # versions of a copy: one is whole while the other is written


@dataclass(frozen=True)
class CopyPlace:
    """Where the copies of a job of a run lie on this node: `node` is its number, `folder` shared memory."""

    run: str
    job: str
    node: int
    folder: Path = PLACE

    def path(self, rank: int, slot: int) -> Path:
        """Where the slices of a rank lie."""
        return self.folder / f"{PREFIX}{self.run}-{self.job}-{rank}-{self.node}-{slot}"


class CopyFile:
    """Room for a rank's slices, and the record beside it. OSError with the file's name."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self.nbytes = path, nbytes
        with naming(path):
            path.unlink(missing_ok=True)
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            if nbytes:
                os.posix_fallocate(self._handle, 0, nbytes)

    @property
    def record_path(self) -> Path:
        """Where its record lies."""
        return record_of(self.path)

    def begin(self) -> None:
        """The elements are about to change: nobody is to take them for whole."""
        with naming(self.path):
            self.record_path.unlink(missing_ok=True)

    def write(self, values: Array, at: int) -> None:
        """Write contiguous values from a byte on."""
        left = memoryview(values).cast("B")
        with naming(self.path):
            while left:
                written = os.pwrite(self._handle, left, at)
                left, at = left[written:], at + written

    def read(self, room: Array, at: int) -> None:
        """Fill room, (bytes,) uint8, from a byte on."""
        with naming(self.path):
            read_into(self._handle, room, at)

    def seal(self, record: bytes) -> None:
        """The elements are those that the record speaks of."""
        write_whole(self.record_path, record)

    def close(self) -> None:
        """Give the handle up; the file stays."""
        os.close(self._handle)


def record_of(path: Path) -> Path:
    """Where the record of a copy lies."""
    return path.with_name(path.name + RECORD)


def read_into(handle: int, room: Array, at: int) -> None:
    """Fill room, (bytes,) uint8, from a byte of a file on; OSError where the file ends before."""
    if fill(handle, memoryview(room), at) < room.size:
        raise OSError(0, "it is cut short")


def pieces(path: Path, nbytes: int) -> Iterator[Array]:
    """The bytes of a copy, piece by piece in one array; raises FileError where they cannot be had."""
    room = np.empty(min(nbytes, PIECE), np.uint8)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            for at in range(0, nbytes, PIECE):
                piece = room[: min(PIECE, nbytes - at)]
                read_into(handle, piece, at)
                yield piece
        finally:
            os.close(handle)
    except OSError as error:
        raise FileError(f"{shown(path)}: cannot be read: {reason(error)}") from None


def check_elements(path: Path, nbytes: int, digest: str) -> None:
    """Raise UsageError unless a file holds the elements that were written."""
    total = xxh3_128()
    for piece in pieces(path, nbytes):
        total.update(piece)
    if total.hexdigest() != digest:
        raise UsageError(f"{shown(path)}: its elements are not those that were written (checksum)")


def ours(run: str, folder: Path = PLACE) -> list[Path]:
    """All files of this user's copies of a run on this host, records and what writing them left included."""
    return [path for path in every_copy(folder) if (match := NAME.fullmatch(path.name)) and match[1] == run]


def every_copy(folder: Path) -> list[Path]:
    """All files of this user's copies of any run on this host."""
    try:
        found = sorted(path for path in folder.iterdir() if NAME.fullmatch(path.name))
    except OSError:  # no such folder
        return []
    return [path for path in found if is_ours(path)]


def is_ours(path: Path) -> bool:
    """Whether a file is there and this user's."""
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:  # it has just gone
        return False


def held(paths: Iterable[Path]) -> int:
    """Bytes that files take."""
    found = 0
    for path in paths:
        with contextlib.suppress(OSError):
            found += 512 * path.lstat().st_blocks
    return found


def remove(run: str, stays: tuple[str, str] = ("", ""), folder: Path = PLACE) -> None:
    """Remove this user's copies of a run on this host; records first.

    stays: a job and the slot of its copies that stay, or an empty text for both
    """
    for path in sorted(ours(run, folder), key=lambda path: RECORD not in path.name):
        match = NAME.fullmatch(path.name)
        if match and not (match[2] == stays[0] and match[5] in (stays[1] or "01")):
            with contextlib.suppress(OSError):  # another rank may have removed it
                path.unlink()
