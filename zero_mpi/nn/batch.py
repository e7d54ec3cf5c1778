"""Context of a micro-batch for its layers: documents, factors of losses, sums of reported values.

Nearly all layers treat each position independently and need only weights and input. Other layers call
`batch_of(p)`: attention and position layers for the documents in a `Packed` input, and a layer with an
auxiliary loss for the loss's factor and for the sums over all layers. Attention reaches back at most to the
start of a document, where positions begin at 0. Shapes are the same as without documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from zero_mpi import device, ops
from zero_mpi.arguments import WHOLE, array
from zero_mpi.device.arrays import namespace
from zero_mpi.device.types import Array
from zero_mpi.nn.layer import Gradients, Weights

Turns = Iterable[tuple[slice, Weights, Gradients]]


@dataclass(frozen=True, eq=False)
class Packed:
    """Input of a model in which a row may have several documents.

    ids      (B, T) integers
    begins   (B, T) int64: for each position, the index in its row at which its document begins

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
                "Packed: begins: expected int64 (B, T), each at most its position, not decreasing in a row"
            )


class Documents:
    """Starts of a micro-batch's documents, on the device, and arrays computed from them at first use."""

    def __init__(self, packed: Packed) -> None:
        self._ids = packed.ids
        self.begins = device.in_use().from_host(packed.begins)
        self._rows: dict[int, tuple[Array, Array]] = {}
        self._within: dict[int, Array] = {}

    @cached_property
    def positions(self) -> Array:
        """Position of each token in its document, (B, T) int64."""
        return namespace(self.begins).arange(self.begins.shape[1]) - self.begins

    @cached_property
    def counted(self) -> Array:
        """Mask (B T,) that is False for padding: ids 0 after a row's last document."""
        xp, ids = namespace(self.begins), device.in_use().from_host(self._ids)
        content = (ids != 0) | (self.positions != 0)
        return xp.cumsum(content[:, ::-1], axis=1)[:, ::-1].reshape(-1) > 0

    def rows(self, table: Array) -> Array:
        """Return the row of `table` at each token's position, (B T, ...); results are cached by table."""
        if id(table) not in self._rows:
            self._rows[id(table)] = table, ops.embedding(self.positions.reshape(-1), table)
        return self._rows[id(table)][1]

    def within(self, window: int) -> Array:
        """Return the first position that each position attends to in a window, (B, T); results are cached."""
        if window not in self._within:
            batch, length = self.begins.shape
            first = first_in_window(batch, 0, length, window, device.home_of(self.begins))
            self._within[window] = namespace(self.begins).maximum(self.begins, first)
        return self._within[window]


@lru_cache(maxsize=32)
def first_in_window(batch: int, start: int, stop: int, window: int, place: device.Device) -> Array:
    """Return the first position in the window that ends at each position from start to stop: (B, T) int64."""
    first = np.maximum(0, np.arange(start, stop) - window + 1)
    return place.from_host(np.tile(first, (batch, 1)))


@dataclass(eq=False)
class BatchContext:
    """Information about a micro-batch besides its input, and the sums of values that its layers report."""

    documents: Documents | None = None  # documents of the rows; None: each row is one document
    factors: Mapping[str, float] = field(default_factory=dict)  # auxiliary loss -> factor; empty: no backward
    sums: dict[str, Any] = field(default_factory=dict)  # sums over layers, complete when backward begins
    stage: int = 0  # number of the current stage
    _reports: set[tuple[str, str, int]] = field(default_factory=set)

    def report(self, layer: str, **values: Any) -> None:
        """Add values of the layer named `layer` to the sums. Recomputation does not add them again."""
        for name, value in values.items():
            if (key := (name, layer, self.stage)) not in self._reports:
                self._reports.add(key)
                self.sums[name] = self.sums[name] + value if name in self.sums else value


class StageWeights(dict[str, Array]):
    """Weights of a stage by name, with the micro-batch for which they are used.

    turns   function that gathers stacked parameters part by part; None: all are present
    """

    def __init__(
        self,
        weights: Weights,
        batch: BatchContext,
        turns: Callable[[StageWeights, Gradients], Turns] | None = None,
    ) -> None:
        super().__init__(weights)
        self.batch, self.turns = batch, turns


def batch_of(p: Weights) -> BatchContext:
    """Return the context of the micro-batch that uses the weights; an empty context if it is unknown."""
    return p.batch if isinstance(p, StageWeights) else BatchContext()


def turns(p: Weights, g: Gradients | None = None) -> Turns:
    """Yield parts of a layer's stacked parameters: (range of their first dimension, weights, gradients).

    A backward, which passes `g`, gets the same parts as its forward, maybe in another order. Weights and
    gradients of a part are valid only until the next part.
    """
    gradients = {} if g is None else g
    return p.turns(p, gradients) if isinstance(p, StageWeights) and p.turns else [(slice(None), p, gradients)]
