"""A file that all ranks write together, by MPI-IO: each its own byte ranges, no data moved between ranks."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zero_mpi.comm.files import OutputFile
from zero_mpi.comm.start_mpi import MPI
from zero_mpi.device.types import Array
from zero_mpi.errors import naming

MOST_BYTES = 1 << 30  # in one call: counts are C ints in older interfaces
CAUSES = {
    MPI.ERR_NO_SPACE: errno.ENOSPC,
    MPI.ERR_QUOTA: errno.EDQUOT,
    MPI.ERR_READ_ONLY: errno.EROFS,
    MPI.ERR_ACCESS: errno.EACCES,
    MPI.ERR_NO_SUCH_FILE: errno.ENOENT,
}


class MPIFile(OutputFile):
    """Opened by all ranks of `comm` (an mpi4py communicator) together; a failure is an OSError on all."""

    def __init__(self, comm: Any, path: Path) -> None:
        self.path = path
        with as_os_errors(path):
            self._file = MPI.File.Open(comm, str(path), MPI.MODE_CREATE | MPI.MODE_WRONLY)

    def resize(self, nbytes: int) -> None:
        with as_os_errors(self.path):
            self._file.Set_size(nbytes)

    def write_at(self, offset: int, data: Array | bytes) -> None:
        view = memoryview(data).cast("B")
        with as_os_errors(self.path):
            for at in range(0, len(view), MOST_BYTES):
                self._put(offset + at, view[at : at + MOST_BYTES])

    def _put(self, offset: int, view: memoryview) -> None:
        """Write by one call. A full disk may show as a short count only; writing the rest names it."""
        status = MPI.Status()
        try:
            self._file.Write_at(offset, [view, MPI.BYTE], status)
        except MPI.Exception as error:
            if error.Get_error_class() not in CAUSES:  # Open MPI does not pass the system's error on
                write_plainly(self.path, offset, view)
            raise
        written = status.Get_count(MPI.BYTE)
        if written < len(view):
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({written} of {len(view)} bytes)")

    def close(self, durable: bool = True) -> None:
        if self._file == MPI.FILE_NULL:
            return
        try:
            if durable:
                with as_os_errors(self.path):
                    self._file.Sync()
        finally:
            self._file.Close()


def write_plainly(path: Path, offset: int, view: memoryview) -> None:
    """Write the same bytes without MPI, to get the OSError of the system."""
    with open(path, "r+b", buffering=0) as file:
        file.seek(offset)
        while view:
            view = view[file.write(view) :]


@contextlib.contextmanager
def as_os_errors(path: Path) -> Iterator[None]:
    """Turn the library's error into an OSError with the file's name and the nearest cause."""
    with naming(path):
        try:
            yield
        except MPI.Exception as error:
            number = CAUSES.get(error.Get_error_class(), errno.EIO)
            said = " ".join(error.Get_error_string().split())
            raise OSError(number, f"{os.strerror(number)} ({said})") from error
