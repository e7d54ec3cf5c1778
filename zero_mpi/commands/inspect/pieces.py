"""File of tensors as `inspect` reads it, a piece at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES

from zero_mpi.checkpoint import folders
from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.sound import (
    AVERAGE,
    MODEL,
    PIECE_BYTES,
    average_beside,
    digest_of_pieces,
    piece_digests,
)
from zero_mpi.checkpoint.state import ARCHITECTURE, STATE
from zero_mpi.checkpoint.tensor_file import NATIVE, TensorSpec, decode
from zero_mpi.checkpoint.weights import WeightSource, keys_of, open_weights
from zero_mpi.ops.block_kinds import PACKED, is_finite

READ_AT_ONCE = 1 << 20  # bytes read at a time


@dataclass(frozen=True)
class Subject:
    """Content of a path: a model, a training state, or both as a checkpoint, maybe with an average."""

    model: WeightSource | None
    state: GGUFFile | None
    average: GGUFFile | None = None

    @property
    def parts(self) -> dict[str, WeightSource]:
        parts = {MODEL: self.model, AVERAGE: self.average, STATE: self.state}
        return {role: part for role, part in parts.items() if part is not None}


def open_subject(path: Path) -> Subject:
    """Open `path`, or a run directory's newest checkpoint. UsageError if it cannot be read."""
    newest = path / folders.LATEST
    if not os.path.exists(folders.weights_in(path)) and os.path.exists(folders.weights_in(newest)):
        path = newest
    adapter = path / folders.ADAPTER
    source = open_weights(adapter if os.path.exists(adapter) else path)
    if isinstance(source, GGUFFile) and keys_of(source).architecture == ARCHITECTURE:
        return Subject(None, source)
    if not os.path.exists(path / folders.OPTIMIZER):
        return Subject(source, None)
    state = GGUFFile.open(path / folders.OPTIMIZER)
    return Subject(source, state, average_beside(state))


def pieces(source: WeightSource, spec: TensorSpec) -> Iterator[Any]:
    """Yield the bytes of a tensor, in pieces of complete blocks and of complete pieces of its digest."""
    block, width = GGML_QUANT_SIZES[spec.type]
    step = math.lcm(PIECE_BYTES, width)
    size = max(1, READ_AT_ONCE // step) * step
    if isinstance(source, GGUFFile):
        yield from source.raw_pieces(spec.name, size)
        return
    for start in range(0, spec.size, size // width * block):  # from the other order back into the stored type
        values = source.read(spec.name, start, min(start + size // width * block, spec.size))
        yield values.astype(NATIVE[spec.type]).view(np.uint8).data


def elements(raw: Any, kind: GGMLQuantizationType) -> Any:
    """Return the values of a piece, or None for a type whose values are not known."""
    if kind.name in ("I8", "I16", "I32", "I64", "F64"):
        return np.frombuffer(raw, f"<{kind.name.lower()[0]}{int(kind.name[1:]) // 8}")
    try:
        return decode(np.frombuffer(raw, np.uint8), kind)
    except NotImplementedError:
        return None


Report = dict[str, Any]


@dataclass(frozen=True)
class Tensor:
    """Tensor that was read: its digest, and how many values are not finite (None: unknown)."""

    spec: TensorSpec
    digest: str
    not_finite: int | None


def read_tensor(source: WeightSource, spec: TensorSpec) -> Tensor:
    """Return digest and count of one tensor, in one pass."""
    odd: int | None = 0

    def digested() -> Iterator[bytes]:
        nonlocal odd
        for raw in pieces(source, spec):
            if spec.type.name not in PACKED or not is_finite(np.frombuffer(raw, np.uint8), spec.type.name):
                values = elements(raw, spec.type)
                known = values is not None and odd is not None
                odd = odd + values.size - int(np.count_nonzero(np.isfinite(values))) if known else None
            yield piece_digests(raw)

    digest = digest_of_pieces(digested())
    return Tensor(spec, digest, odd)
