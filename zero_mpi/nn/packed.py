"""Several documents in a row of tokens: what keeps them apart in the layers that mix or number positions.

Nearly all layers treat each position by itself and need not know. Those that do not ask `documents()`, which
whoever calls them has set by `reading`: a module does, for an input that is `Packed`. Attention then looks no
further back than a document's beginning, from where positions are counted. Shapes are those of rows without
documents, so the same memory serves whatever lies in a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from zero_mpi import device, ops
from zero_mpi.arguments import WHOLE, array
from zero_mpi.device.arrays import namespace
from zero_mpi.device.types import Array


@dataclass(frozen=True, eq=False)
class Packed:
    """Rows of several documents each, as the input of a model in the place of ids.

    ids      (B, T) whole numbers
    begins   (B, T) int64: for each position that of its row at which its document begins

    Raises ValueError for arrays that cannot be these.
    """

    ids: Array
    begins: Array

    def __post_init__(self) -> None:
        array("Packed: ids", self.ids, kinds=WHOLE)
        array("Packed: begins", self.begins, tuple(self.ids.shape), kinds=WHOLE)
        xp, b = namespace(self.begins), self.begins
        falls = b.ndim != 2 or b.dtype != xp.int64 or (b[:, 1:] < b[:, :-1]).any()
        if falls or (b < 0).any() or (b > xp.arange(b.shape[1])).any():
            raise ValueError(
                "Packed: begins: expected int64 positions (B, T), none behind its own, in rising rows"
            )


class Documents:
    """Where the documents of a micro-batch begin, on the device, and what layers make of it once for all."""

    def __init__(self, begins: Array) -> None:
        self.begins = device.in_use().from_host(begins)
        self._rows: dict[int, tuple[Array, Array]] = {}
        self._within: dict[int, Array] = {}

    @cached_property
    def positions(self) -> Array:
        """The position of each token in its document, (B, T) int64."""
        return namespace(self.begins).arange(self.begins.shape[1]) - self.begins

    def rows(self, table: Array) -> Array:
        """The rows of a table (positions, ...) for each token, (B T, ...): made once for each table."""
        found = self._rows.get(id(table))
        if found is None:
            found = self._rows[id(table)] = table, ops.embedding(self.positions.reshape(-1), table)
        return found[1]

    def within(self, window: int) -> Array:
        """The first position that each sees of its document, `window` at most: made once for each."""
        if window not in self._within:
            batch, length = self.begins.shape
            first = first_in_window(batch, 0, length, window, device.home_of(self.begins))
            self._within[window] = namespace(self.begins).maximum(self.begins, first)
        return self._within[window]


@lru_cache(maxsize=32)
def first_in_window(batch: int, start: int, stop: int, window: int, place: device.Device) -> Array:
    """The first position that each of start to stop sees through a window: (B, T) int64."""
    first = np.maximum(0, np.arange(start, stop) - window + 1)
    return place.from_host(np.tile(first, (batch, 1)))


_documents: Documents | None = None


def documents() -> Documents | None:
    """The documents of the rows that are being computed; None where a row is one."""
    return _documents


@contextmanager
def reading(found: Documents | None) -> Iterator[None]:
    """Let layers that are called within see these documents."""
    global _documents
    before, _documents = _documents, found
    try:
        yield
    finally:
        _documents = before
