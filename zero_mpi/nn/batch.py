"""Facts and sums of a micro-batch that layers share; they come with the weights of a stage.

Nearly all layers need only weights and input. The others ask `batch_of(p)`: attention for the documents of
its rows, a layer with an auxiliary loss for its factor and for the sums over all such layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zero_mpi.device.types import Array
from zero_mpi.nn.layer import Weights
from zero_mpi.nn.packed import Documents


@dataclass(eq=False)
class BatchContext:
    """Facts of a micro-batch beside its input, and sums of what its layers report.

    documents   the documents of its rows; None if each row is one document
    factors     name -> factor of an auxiliary loss in the scaled objective of the step; none: no backward
    sums        name -> sum over the layers that have reported so far; complete when backward begins
    """

    documents: Documents | None = None
    factors: Mapping[str, float] = field(default_factory=dict)
    sums: dict[str, Any] = field(default_factory=dict)
    stage: int = 0  # of the layers that compute
    _reported: set[tuple[str, str, int]] = field(default_factory=set)

    def factor(self, name: str) -> float:
        """Return the factor of an auxiliary loss's gradient in backward; 0: leave the loss out."""
        return self.factors.get(name, 0.0)

    def report(self, layer: str, **values: Any) -> None:
        """Add values of the layer called `layer` to the sums; a forward that runs again adds nothing."""
        for name, value in values.items():
            key = name, layer, self.stage
            if key not in self._reported:
                self._reported.add(key)
                self.sums[name] = self.sums[name] + value if name in self.sums else value


class Given(dict[str, Array]):
    """Weights of a stage by name, with the micro-batch that they are used on."""

    def __init__(self, weights: Weights, batch: BatchContext) -> None:
        super().__init__(weights)
        self.batch = batch


def batch_of(p: Weights) -> BatchContext:
    """Return the micro-batch that weights are used on; an empty one for weights that are no `Given`."""
    return p.batch if isinstance(p, Given) else BatchContext()
