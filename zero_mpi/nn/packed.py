"""Several documents in a row of tokens: layers that mix or number positions keep them apart.

Nearly all layers treat each position independently and need no documents. The others ask for those of the
micro-batch (`nn.batch`), which a module derives from an input that is `Packed`. Attention then reaches back
to a document's start at most, and positions are counted from there. Shapes are those of rows without
documents, so the memory needed is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from zero_mpi import device, ops
from zero_mpi.arguments import WHOLE, array
from zero_mpi.device.arrays import namespace
from zero_mpi.device.types import Array


@dataclass(frozen=True, eq=False)
class Packed:
    """Rows of several documents each, as the input of a model instead of ids.

    ids      (B, T) integers
    begins   (B, T) int64: for each position, the position in its row at which its document begins

    Raises ValueError for invalid arrays.
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
    """Starts of a micro-batch's documents, on the device, and arrays that layers derive from them once."""

    def __init__(self, packed: Packed) -> None:
        self._ids = packed.ids
        self.begins = device.in_use().from_host(packed.begins)
        self._rows: dict[int, tuple[Array, Array]] = {}
        self._within: dict[int, Array] = {}

    @cached_property
    def positions(self) -> Array:
        """The position of each token in its document, (B, T) int64."""
        return namespace(self.begins).arange(self.begins.shape[1]) - self.begins

    @cached_property
    def counted(self) -> Array:
        """False for the padding behind a row's last document: ids of 0 that are each alone; (B T,) bool."""
        xp, ids = namespace(self.begins), device.in_use().from_host(self._ids)
        within = (ids != 0) | (self.positions != 0)
        return xp.cumsum(within[:, ::-1], axis=1)[:, ::-1].reshape(-1) > 0

    def rows(self, table: Array) -> Array:
        """Return the rows of a table (positions, ...) for each token, (B T, ...): made once per table."""
        found = self._rows.get(id(table))
        if found is None:
            found = self._rows[id(table)] = table, ops.embedding(self.positions.reshape(-1), table)
        return found[1]

    def within(self, window: int) -> Array:
        """Return the first position of its document in each position's window: made once per window."""
        if window not in self._within:
            batch, length = self.begins.shape
            first = first_in_window(batch, 0, length, window, device.home_of(self.begins))
            self._within[window] = namespace(self.begins).maximum(self.begins, first)
        return self._within[window]


@lru_cache(maxsize=32)
def first_in_window(batch: int, start: int, stop: int, window: int, place: device.Device) -> Array:
    """Return the first position in the window of each position from start to stop: (B, T) int64."""
    first = np.maximum(0, np.arange(start, stop) - window + 1)
    return place.from_host(np.tile(first, (batch, 1)))
