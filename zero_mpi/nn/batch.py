"""Facts and sums of a micro-batch that layers share; they come with the weights of a stage.

Nearly all layers need only weights and input. The others ask `batch_of(p)`: attention for the documents of
its rows, a routed layer for the sums over all routed layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero_mpi.device.types import Array
from zero_mpi.nn.layer import Weights
from zero_mpi.nn.packed import Documents


@dataclass(eq=False)
class BatchContext:
    """Facts of a micro-batch beside its input.

    documents   the documents of its rows; None if each row is one document
    """

    documents: Documents | None = None


class Given(dict[str, Array]):
    """Weights of a stage by name, with the micro-batch that they are used on."""

    def __init__(self, weights: Weights, batch: BatchContext) -> None:
        super().__init__(weights)
        self.batch = batch


def batch_of(p: Weights) -> BatchContext:
    """Return the micro-batch that weights are used on; an empty one for weights that are no `Given`."""
    return p.batch if isinstance(p, Given) else BatchContext()
