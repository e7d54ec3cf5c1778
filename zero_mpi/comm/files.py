"""A file that is written at places: by one process, or by all ranks each its own ranges.

Errors are OSErrors with the file's name, whichever library wrote.
"""

from __future__ import annotations

import contextlib
import os
import sys
from abc import ABC, abstractmethod
from pathlib import Path

from zero_mpi.device.types import Array
from zero_mpi.errors import naming

DISK_BYTES = 16 << 20  # bytes after whose writing the disk is set to work, long before the file is closed


class OutputFile(ABC):
    """A new file; what no range covers is zeros once `resize` has given it its length."""

    path: Path

    @abstractmethod
    def resize(self, nbytes: int) -> None:
        """Give the file its length. Collective where all ranks write."""

    @abstractmethod
    def write_at(self, offset: int, data: Array | bytes) -> None:
        """Write `data` (C-contiguous) at a byte offset; any thread, any order, any rank that has the file."""

    @abstractmethod
    def close(self, durable: bool = True) -> None:
        """Bring the file to disk, if `durable`, and close it. Collective where all ranks write."""


class PlainFile(OutputFile):
    """Written by this process alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._since = 0  # bytes written that the disk was not yet told of, and between which places
        self._first, self._last = sys.maxsize, 0

    def resize(self, nbytes: int) -> None:
        with naming(self.path):
            os.ftruncate(self._handle, nbytes)

    def write_at(self, offset: int, data: Array | bytes) -> None:
        left, first = memoryview(data).cast("B"), offset
        with naming(self.path):
            while left:
                written = os.pwrite(self._handle, left, offset)
                left, offset = left[written:], offset + written
        self._since += offset - first
        self._first, self._last = min(self._first, first), max(self._last, offset)
        if self._since >= DISK_BYTES:
            self._start_disk()

    def _start_disk(self) -> None:
        """Let the system begin to bring what was written to disk, without waiting for it.

        It would begin only at the end, when nothing is left to do beside it. To say that the bytes are not
        needed any more starts that, and drops none that are not on disk.
        """
        first, count = self._first, self._last - self._first
        self._since, self._first, self._last = 0, sys.maxsize, 0
        if hasattr(os, "posix_fadvise"):  # advice: a file system that refuses it is none the worse
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._handle, first, count, os.POSIX_FADV_DONTNEED)

    def close(self, durable: bool = True) -> None:
        if self._handle < 0:
            return
        handle, self._handle = self._handle, -1
        try:
            if durable:
                with naming(self.path):
                    os.fsync(handle)
        finally:
            os.close(handle)
