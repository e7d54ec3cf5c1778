"""Files of tensors: they are checked when opened, read in ranges, and decoded to float32.

All formats share this module. A file is untrusted and may change. So only a regular file is opened, its
length is compared with the length when its index was read, and a short read raises an error that names the
file. Files are not memory-mapped, because a file that shrinks while mapped kills the process with a signal.
float32 is read directly into the result; other types pass through a buffer of limited size.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from zero_mpi.errors import FileError
from zero_mpi.files.foreign import show
from zero_mpi.files.open import fill, open_file, refusing

Metadata = dict[str, Any]
"""Keys in file order. A value has exactly the type in the file: `str`, `bool`, a NumPy scalar of the key's
width, a read-only 1-D array of such scalars or of bool, or `list[str]`."""

Floats = npt.NDArray[np.float32]
CHUNK = 1 << 20  # elements that are decoded at once; limits temporary memory for large tensors
NATIVE = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape in NumPy order, and element type of a tensor."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        block, width = GGML_QUANT_SIZES[self.type]
        return int(self.size // block * width)


@dataclass(frozen=True)
class StoredFile:
    """A file whose index was read. It is not kept open. Links in `path` are resolved."""

    path: Path
    nbytes: int

    @contextmanager
    def opened(self) -> Iterator[FileIO]:
        """Open the file without a buffer. Raise FileError if it is missing or its length has changed."""
        with open_file(self.path) as file:
            self.expect(self.nbytes, os.fstat(file.fileno()).st_size)
            yield file

    def expect(self, expected: int, actual: int) -> None:
        if actual != expected:
            raise FileError(f"{self.path}: changed while in use: expected {expected} bytes, found {actual}")

    def fill(self, file: FileIO, offset: int, out: memoryview) -> None:
        with refusing("", self.path, "cannot be read"):
            self.expect(len(out), fill(file.fileno(), out, offset))

    def take(self, file: FileIO, offset: int, count: int) -> npt.NDArray[np.uint8]:
        raw = np.empty(count, np.uint8)
        self.fill(file, offset, raw.data)
        return raw

    def chunks(self, offset: int, count: int, size: int) -> Iterator[memoryview]:
        with self.opened() as file:
            for at in range(0, count, size):
                yield self.take(file, offset + at, min(size, count - at)).data

    def bytes_at(self, offset: int, out: npt.NDArray[np.uint8]) -> None:
        with self.opened() as file:
            if out.size:
                self.fill(file, offset, out.data)

    def values(self, offset: int, spec: TensorSpec, start: int, out: Floats) -> None:
        """Fill `out` (1-D) with elements from `start` on of a tensor, whose data begins at byte `offset`."""
        if spec.type == GGMLQuantizationType.F32:
            self.bytes_at(offset + 4 * start, out.view(np.uint8))
            return
        block, width = GGML_QUANT_SIZES[spec.type]
        with self.opened() as file:
            for at in range(0, out.size, CHUNK):
                target = out[at : at + CHUNK]
                # A block is read in full, even if only part of it is requested.
                first, last = (start + at) // block, -(-(start + at + target.size) // block)
                raw = self.take(file, offset + first * width, (last - first) * width)
                try:
                    values = decode(raw, spec.type)
                except NotImplementedError:
                    problem = f"expected F32, F16, BF16 or a quantized type, found {spec.type.name}"
                    raise FileError(f"{self.path}: tensor {show(spec.name)}: {problem}") from None
                target[:] = values[start + at - first * block :][: target.size]


def decode(raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> npt.NDArray[np.floating]:
    """Decode full blocks (bytes,) to elements (elements,) of a dtype whose values float32 can hold exactly.

    Raises NotImplementedError for a type that holds no weights. NumPy's warnings are suppressed: a damaged
    scale may be infinite, and then the values are not finite.
    """
    if kind in NATIVE:
        return raw.view(NATIVE[kind])
    with np.errstate(all="ignore"):
        values: Floats = dequantize(raw, kind)
    return values


class Readable(ABC):
    """Base class of files whose tensors are read as float32. Subclasses define `spec` and `fill`."""

    @abstractmethod
    def spec(self, name: str) -> TensorSpec:
        """Return the name, shape and type of a tensor. Raise UsageError for a type that holds no weights."""

    @abstractmethod
    def fill(self, spec: Any, start: int, out: Floats) -> None:
        """Fill `out` (n,) with the n elements of a tensor from element `start` on."""

    def read(self, name: str, start: int = 0, stop: int | None = None, out: Floats | None = None) -> Floats:
        """Return elements [start, stop) of the flattened tensor, float32 (stop - start,), in `out` if given.

        Only full blocks that hold these elements are read (full rows, if transposed). Raises UsageError for
        a type that holds no weights or a changed file; ValueError for an invalid range.
        """
        spec = self.spec(name)
        stop = spec.size if stop is None else stop
        if not 0 <= start <= stop <= spec.size:
            raise ValueError(f"tensor {name!r}: range [{start}, {stop}) is not inside [0, {spec.size})")
        out = np.empty(stop - start, np.float32) if out is None else out.reshape(-1)
        assert out.size == stop - start, "expected `out` with the size of the range"
        self.fill(spec, start, out)
        return out

    def tensor(self, name: str) -> Floats:
        return self.read(name).reshape(self.spec(name).shape)


class WeightSource(Readable):
    """Base class of weights with GGUF's names, keys and element order. Subclasses set the fields.

    path       the file or folder
    metadata   the model's keys, as in a GGUF file
    tensors    name -> shape and type
    """

    path: Path
    metadata: Metadata
    tensors: Mapping[str, TensorSpec]

    def spec(self, name: str) -> TensorSpec:
        if name not in self.tensors:
            raise FileError(f"{self.path}: expected a tensor {show(name)}, found none of that name")
        return self.tensors[name]
