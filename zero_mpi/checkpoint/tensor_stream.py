"""A file of tensors written front to back: a header, then the announced tensors in their order.

Memory is bounded by one piece. The formats have no names beside the data, so two tensors of one size written
in the wrong order would be swapped in silence: every write says its name, and the name must be the next one
announced. Closing brings the file to disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from zero_mpi.errors import naming
from zero_mpi.files.foreign import show

Buffer = bytes | memoryview


class TensorStream:
    """Writes `header`, then tensors of so many bytes (`lengths`, in their order), each padded to `alignment`.

    OSError, with the file's name, here and in every method.
    """

    def __init__(
        self, path: str | os.PathLike[str], header: bytes, lengths: Mapping[str, int], alignment: int = 1
    ) -> None:
        self.path = Path(path)
        self._lengths, self._alignment = lengths, alignment
        self._order, self._done = list(lengths), 0
        self._file = open(self.path, "wb")  # noqa: SIM115 (closed by close or __exit__)
        self._put(header)

    def write_raw(self, name: str, pieces: Iterable[Buffer]) -> None:
        """Append the next tensor from its encoded bytes, in pieces of any size.

        ValueError unless it is the next one and the pieces make up its length; the stream is of no use then.
        """
        self.expect_next(name)
        expected, found = self._lengths[name], 0
        for data in pieces:
            piece = memoryview(data)
            found += piece.nbytes
            if found > expected:
                break
            self._put(piece)
        if found != expected:
            self._abandon()
            more = "more" if found > expected else f"{found}"
            raise ValueError(f"{self.path}: tensor {show(name)}: expected {expected} bytes, got {more}")
        self._put(bytes(-found % self._alignment))
        self._done += 1

    def close(self) -> None:
        """Bring the file to disk. ValueError when announced tensors are missing. Twice is once."""
        if self._file.closed:
            return
        try:
            self._check_complete()
            with naming(self.path):
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
        except BaseException:
            self._abandon()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()

    def expect_next(self, name: str) -> None:
        """ValueError unless `name` is the tensor whose turn it is."""
        if self._file.closed:
            raise ValueError(f"{self.path}: expected an open stream, this one is closed: open a new one")
        if self._order[self._done : self._done + 1] != [name]:
            left = self._order[self._done :]
            expected = show(left[0]) if left else "no further tensor"
            raise ValueError(f"{self.path}: expected {expected}, got {show(name)}: keep the announced order")

    def _put(self, data: Buffer) -> None:
        try:
            with naming(self.path):
                self._file.write(data)
        except OSError:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Close the handle; the error that led here is the one to report, not a second flush's."""
        with suppress(OSError):
            self._file.close()

    def _check_complete(self) -> None:
        missing = self._order[self._done :]
        if missing:
            where = f"{len(missing)} of {len(self._order)} tensors, from {show(missing[0])} on"
            raise ValueError(f"{self.path}: expected all announced tensors, missing are {where}")
