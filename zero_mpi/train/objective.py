"""The loss that a run learns from: for each micro-batch a `HeadLoss`, for each step what is recorded of it.

Training, its recomputation and evaluation take whichever objective the flags choose, and know no kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zero_mpi.data import Batch, EvalLoader, StepLoader
from zero_mpi.device.types import Array
from zero_mpi.nn import CrossEntropy, Packed
from zero_mpi.nn.loss import HeadLoss
from zero_mpi.sharding import ShardedModule
from zero_mpi.sharding.evaluation import evaluate

Figures = dict[str, float]


class StepLoss:
    """Losses of the micro-batches of a step."""

    @property
    def sums(self) -> Sequence[float]:
        """Numbers of this rank that are added over all ranks."""
        return ()

    def micro(self, i: int) -> tuple[Any, HeadLoss]:
        """Return input and loss of micro-batch i."""
        raise NotImplementedError

    def figures(self, sums: Sequence[float]) -> Figures:
        """Return what is recorded of the step, from the sums over all ranks."""
        return {}


class Objective:
    """Cross-entropy of the targets that count; the base of other objectives.

    keeps: it depends on numbers of the initial model, which `keep` returns, and `use` takes
    """

    keeps = False

    def __init__(self, module: ShardedModule, loader: StepLoader) -> None:
        self.module, self.loader = module, loader

    def keep(self) -> NDArray[np.float64]:
        """Return what is kept of the model as it is now. Collective."""
        raise NotImplementedError

    def use(self, kept: NDArray[np.float64]) -> None:
        """Use what `keep` returned."""

    def step(self, number: int) -> StepLoss:
        """Return the losses of a step (from 0). Collective."""
        return CrossEntropyStep(self.loader, number)

    def held_out(self, loader: EvalLoader) -> tuple[float, Figures]:
        """Return the mean loss of held-out data, and further figures. Collective."""
        scale = 1.0 / loader.counted
        return evaluate(self.module, loader.micro_batches, lambda i: with_loss(loader.micro(i), scale)), {}


class CrossEntropyStep(StepLoss):
    """Cross-entropy of a step's micro-batches."""

    def __init__(self, loader: StepLoader, number: int) -> None:
        self._loader, self._number, self._scale = loader, number, 1.0 / loader.counted(number)

    def micro(self, i: int) -> tuple[Any, HeadLoss]:
        return with_loss(self._loader.micro(self._number, i), self._scale)


def with_loss(batch: Batch, scale: float) -> tuple[Array | Packed, CrossEntropy]:
    """Return the input of the model, and the cross-entropy of its targets."""
    return as_input(batch), CrossEntropy(batch.targets, scale)


def as_input(batch: Batch) -> Array | Packed:
    """Return the input of the model."""
    return batch.inputs if batch.begins is None else Packed(batch.inputs, batch.begins)
