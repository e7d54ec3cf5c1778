"""Writer of GGUF files for tests; tensors may be written in any order."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from zero_mpi.checkpoint.gguf.header import Announced, pack_file


class GGUFStream:
    """Open file with its header; tensors that are not written contain zeros."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        architecture: str,
        metadata: Mapping[str, Any],
        tensors: Sequence[Announced],
    ) -> None:
        header, self._offsets, total = pack_file(architecture, metadata, tensors)
        self._file = open(path, "wb")  # noqa: SIM115 (closed by __exit__)
        self._file.write(header)
        self._file.truncate(total)

    def write(self, name: str, array: np.ndarray) -> None:
        assert array.dtype == np.float32
        self.write_raw(name, [array.tobytes()])

    def write_raw(self, name: str, pieces: Iterable[bytes]) -> None:
        self._file.seek(self._offsets[name])
        self._file.writelines(pieces)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def write_tensors(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> Path:
    """Write a file of keys and float32 tensors; return its path."""
    table = [(name, array.shape) for name, array in tensors.items()]
    with GGUFStream(path, architecture, metadata, table) as stream:
        for name, array in tensors.items():
            stream.write(name, array)
    return path
