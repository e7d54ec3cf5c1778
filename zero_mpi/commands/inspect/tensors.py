"""The tensors of a file, each read once, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from zero_mpi.checkpoint.checksum import digest_of_pieces, piece_digests
from zero_mpi.checkpoint.tensor_file import TensorSpec
from zero_mpi.checkpoint.weights import WeightSource
from zero_mpi.commands.inspect.pieces import elements, pieces

Report = dict[str, Any]


@dataclass(frozen=True)
class Tensor:
    """A tensor that was read: its digest, and how many values are not finite (None: it cannot be told)."""

    spec: TensorSpec
    digest: str
    not_finite: int | None


def read_tensor(source: WeightSource, spec: TensorSpec) -> Tensor:
    """Digest and count of one tensor, in one pass."""
    odd: int | None = 0

    def digested() -> Iterator[bytes]:
        nonlocal odd
        for raw in pieces(source, spec):
            values = elements(raw, spec.type)
            known = values is not None and odd is not None
            odd = odd + values.size - int(np.count_nonzero(np.isfinite(values))) if known else None
            yield piece_digests(raw)

    digest = digest_of_pieces(digested())
    return Tensor(spec, digest, odd)
