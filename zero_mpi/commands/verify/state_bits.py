"""Whether parameters and moments as the ranks hold them are those of a checkpoint, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from zero_mpi.checkpoint.parallel_write import PIECE_ELEMENTS
from zero_mpi.checkpoint.saver import Parts
from zero_mpi.checkpoint.shards import Contribution
from zero_mpi.checkpoint.sound import CheckpointFiles
from zero_mpi.checkpoint.state import STATE
from zero_mpi.checkpoint.weights import WeightSource


class OtherElement(NamedTuple):
    """An element that differs, in the order of files, tensors and elements; both values as float32."""

    role: int
    tensor: int
    element: int
    file: str
    name: str
    found: float
    stored: float


def first_other(files: CheckpointFiles, parts: Parts, rank: int) -> OtherElement | None:
    """The first element of this rank's slices that is not the checkpoint's; raises FileError."""
    sources: dict[str, WeightSource] = {**files.weights, STATE: files.state}
    others = (
        other
        for place, (role, given) in enumerate(parts.items())
        for one in given
        for other in others_in(place, sources[role], one, rank)
    )
    return min(others, default=None)


def others_in(role: int, file: WeightSource, given: Contribution, rank: int) -> Iterator[OtherElement]:
    """The first element of each piece and tensor that differs."""
    order = {name: place for place, name in enumerate(file.tensors)}
    for at in range(0, given.values.size, PIECE_ELEMENTS):
        mine = given.on_host(slice(at, min(at + PIECE_ELEMENTS, given.values.size)))
        for name, first, run in given.runs(given.partition.bounds[rank] + at, mine):
            stored = file.read(name, first, first + run.size)
            odd = np.flatnonzero(run.view(np.uint32) != stored.view(np.uint32))
            if odd.size:
                place = int(odd[0])
                values = float(run[place]), float(stored[place])
                yield OtherElement(role, order[name], first + place, file.path.name, name, *values)
