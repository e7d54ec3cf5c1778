"""Conversion of tensors to another type, in pieces of full rows, which ranks may share out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, quantize
from gguf.constants import GGML_QUANT_SIZES

from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.mixes import PLAIN
from zero_mpi.checkpoint.weights import WeightSource
from zero_mpi.errors import FileError
from zero_mpi.files.foreign import show
from zero_mpi.ops import ggml

AT_ONCE = 1 << 18  # elements encoded at a time: a few MiB with all temporaries
COPIED = 1 << 20  # bytes copied at a time
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Encoder:
    """The types of a source's tensors in a file, and how blocks are made.

    by_ggml      by ggml's quantizers; otherwise by the package gguf, which has those of 8 bits and the oldest
    importance   weights of columns by tensor, (matrices, width)
    """

    source: WeightSource
    kinds: dict[str, GGMLQuantizationType]
    by_ggml: bool = False
    importance: dict[str, Floats] = field(default_factory=dict)

    def table(self) -> list[tuple[str, tuple[int, ...], GGMLQuantizationType]]:
        """Return name, shape and type of each tensor."""
        return [(name, spec.shape, self.kinds[name]) for name, spec in self.source.tensors.items()]

    def pieces(self, name: str) -> list[tuple[int, int, int]]:
        """Return the pieces of a tensor: first and last element, and first byte in the file's tensor."""
        spec, kind = self.source.tensors[name], self.kinds[name]
        block, nbytes = GGML_QUANT_SIZES[kind]
        width, matrix = spec.shape[-1], spec.size // (spec.shape[0] if len(spec.shape) > 2 else 1)
        step = max(1, AT_ONCE // width) * width if kind not in PLAIN else AT_ONCE
        return [
            (at, min(at + step, start + matrix), at // block * nbytes)
            for start in range(0, spec.size, matrix)
            for at in range(start, start + matrix, step)
        ]

    def encoded(self, name: str, start: int, stop: int) -> memoryview:
        """Return elements [start, stop) in the tensor's type; the source's own bytes if it has that type."""
        spec, kind = self.source.tensors[name], self.kinds[name]
        block, nbytes = GGML_QUANT_SIZES[kind]
        if isinstance(self.source, GGUFFile) and spec.type == kind:
            raw = np.empty((stop - start) // block * nbytes, np.uint8)
            self.source.read_bytes(name, start // block * nbytes, raw)
            return raw.data
        what, values = f"{self.source.path}: tensor {show(name)}", self.source.read(name, start, stop)
        if kind in PLAIN or not self.by_ggml:
            return next(encoded_pieces(what, [values], kind))
        check_finite(what, values)
        weights = self.importance.get(name)
        if weights is not None:
            weights = weights[start // (spec.size // len(weights))]
        try:
            return ggml.quantize(values.reshape(-1, spec.shape[-1]), kind, weights).reshape(-1).data
        except OverflowError:
            raise too_large(what, values, kind) from None


def check_finite(what: str, values: Floats) -> None:
    """Raise FileError unless all values are finite."""
    if not np.isfinite(values).all():
        raise FileError(f"{what}: expected finite numbers, found some that are not")


def too_large(what: str, values: Floats, kind: GGMLQuantizationType) -> FileError:
    """Return the error for values that a type cannot hold."""
    return FileError(f"{what}: {np.abs(values).max():g} is more than {kind.name} can hold: take bf16 or f32")


def encoded_pieces(what: str, pieces: Iterable[Floats], kind: GGMLQuantizationType) -> Iterator[memoryview]:
    """Yield flat pieces, of whole blocks, in a type. FileError for values not finite or too large for it."""
    for piece in pieces:
        check_finite(what, piece)
        for at in range(0, max(piece.size, 1), AT_ONCE):
            try:
                with np.errstate(over="raise"):  # not infinity in the place of a large number
                    yield quantize(piece[None, at : at + AT_ONCE], kind).data
            except FloatingPointError:
                raise too_large(what, piece, kind) from None
