"""Files whose layout on servers is asked for by hints of MPI-IO, the one way that all parallel file systems
have in common. Nothing is written by it (`checkpoint.output_file` says why)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from zero_mpi.comm.start_mpi import MPI


def make_file(path: Path, hints: Mapping[str, str]) -> None:
    """Make an empty file. Not collective.

    Hints that a library or a file system does not know have no effect, and where a library refuses there is
    no file: whoever opens it next makes it, or hears the system's own error.
    """
    info = MPI.Info.Create()
    for key, value in hints.items():
        info.Set(key, value)
    with suppress(MPI.Exception):
        MPI.File.Open(MPI.COMM_SELF, str(path), MPI.MODE_CREATE | MPI.MODE_WRONLY, info).Close()
    info.Free()
