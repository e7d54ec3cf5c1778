"""A file that one or more ranks write at places, each by a handle of its own.

Plain calls and not MPI-IO: the ranges of ranks do not overlap, and where hosts may not write at once they
do not (`checkpoint.writers`). So a file is brought to disk once a host, where MPI's Sync does it once a rank,
what lies side by side goes in one call, and errors are the system's own, with the file's name.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from itertools import islice
from pathlib import Path

from zero_mpi.device.types import Array
from zero_mpi.errors import naming
from zero_mpi.files.open import open_in_place

DISK_BYTES = 16 << 20  # bytes after whose writing the disk is set to work, long before the file is closed
MOST_BUFFERS = 1024  # that the system takes in one call


class OutputFile:
    """A file open for writing, `new` or made by another rank; OSErrors have its name.

    What no range covers is zeros once `resize` has given it its length.
    """

    def __init__(self, path: Path, new: bool = True) -> None:
        self.path = path
        self._handle = open_in_place(path, os.O_RDWR | (os.O_CREAT | os.O_TRUNC) * new)
        self._since = 0  # bytes written that the disk was not yet told of, and between which places
        self._first, self._last = sys.maxsize, 0

    def resize(self, nbytes: int) -> None:
        """Give the file its length."""
        with naming(self.path):
            os.ftruncate(self._handle, nbytes)

    def write_at(self, offset: int, *data: Array | bytes) -> None:
        """Write `data` (each C-contiguous), one after the other, from a byte offset on; from any thread."""
        left, first = deque(memoryview(part).cast("B") for part in data), offset
        with naming(self.path):
            while left:
                written = os.pwritev(self._handle, list(islice(left, MOST_BUFFERS)), offset)
                offset += written
                while left and written >= len(left[0]):
                    written -= len(left.popleft())
                if written:
                    left[0] = left[0][written:]
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

    def sync(self) -> None:
        """Bring to disk what this host wrote, whichever of its processes did."""
        with naming(self.path):
            os.fsync(self._handle)

    def close(self, durable: bool = True) -> None:
        """Close the file, brought to disk if `durable`; twice is once."""
        if self._handle < 0:
            return
        try:
            if durable:
                self.sync()
        finally:
            handle, self._handle = self._handle, -1
            with naming(self.path):
                os.close(handle)
