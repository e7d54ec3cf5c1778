"""Writes GGUF files as a stream: keys and tensor table first, then one tensor at a time.

The head is packed by `header`, and `tensor_stream` keeps order and length. The gguf package's writer is not
used: it takes no name while streaming, and its `ndarray.tofile` loses the errno of a full disk.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from zero_mpi.checkpoint.gguf.header import Announced, alignment_of, checked_table, pack_file
from zero_mpi.checkpoint.gguf.index import GGUFError
from zero_mpi.checkpoint.tensor_stream import TensorStream
from zero_mpi.files.foreign import show


class GGUFStream(TensorStream):
    """Writes one GGUF file, tensor by tensor.

    `metadata` and `tensors` are as `pack_file` takes them; tensors are announced in the order of writing.

    Raises GGUFError, before the file is touched, for a key, value, name or shape that GGUF or llama.cpp
    would refuse; OSError with the file's name, here and in every method.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        architecture: str,
        metadata: Mapping[str, Any],
        tensors: Sequence[Announced],
    ) -> None:
        try:
            header, _, _ = pack_file(architecture, metadata, tensors)
            self._specs = checked_table(tensors)
            alignment = alignment_of(metadata)
        except GGUFError as error:
            raise GGUFError(f"{os.fspath(path)}: {error}") from None
        lengths = {name: spec.nbytes for name, spec in self._specs.items()}
        super().__init__(path, header, lengths, alignment)

    def write(self, name: str, array: npt.NDArray[np.float32]) -> None:
        """Append the next tensor, of type F32. ValueError unless it is the next one, in shape and dtype."""
        self.expect_next(name)
        spec = self._specs[name]
        if spec.type != GGMLQuantizationType.F32:
            raise ValueError(
                f"{self.path}: tensor {show(name)} is {spec.type.name}: give its bytes to write_raw"
            )
        if array.dtype != np.float32 or array.shape != spec.shape:
            found = f"{array.dtype} {array.shape}"
            raise ValueError(f"{self.path}: tensor {show(name)}: expected float32 {spec.shape}, got {found}")
        self.write_raw(name, [np.ascontiguousarray(array).data])
