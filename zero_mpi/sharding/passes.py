"""A micro-batch on its way through the stages of a module: what the actions that compute read and write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import numpy as np

from zero_mpi import device, ops
from zero_mpi.arguments import UNCOUNTED, came
from zero_mpi.comm import Comm
from zero_mpi.device.arrays import Scalar, pool_of
from zero_mpi.nn.batch import BatchContext, Given
from zero_mpi.nn.fusions import loss_alone, loss_and_backward
from zero_mpi.nn.layer import Stage
from zero_mpi.nn.packed import Documents, Packed
from zero_mpi.sharding.loss_scale import LossScale
from zero_mpi.sharding.parameters import Views
from zero_mpi.telemetry import spans

ROW_STEPS = 8  # numbers of rows that a last stage may be given


class SharedStages(Protocol):
    """Interface of the module that a micro-batch goes through."""

    owners: Comm
    loss_scale: LossScale

    @property
    def comm(self) -> Comm:
        """The transport between all ranks."""

    @property
    def stages(self) -> Sequence[Stage]:
        """The stages, in order."""

    def weights_of(self, stage: int) -> Views:
        """Return the gathered parameters of a stage, by name."""

    def factors(self) -> Mapping[str, float]:
        """Return the factors of auxiliary losses in the scaled objective, by name."""

    def gradients_of(self, stage: int) -> Views:
        """Return the gradients that a stage's backward adds to, by name."""


@dataclass(frozen=True)
class Objective:
    """The cross-entropy that the last stage takes together with its forward, with targets on the device.

    parts   indices of targets: where no backward follows, each part has a loss of its own
    rows    (K,) those of x (B T, C) that the last stage is given; None: x itself
    """

    targets: Any
    scale: float
    parts: Sequence[Any]
    rows: Any = None

    def of(self, x: Any) -> tuple[Any, Any]:
        """Return the rows of its input that the last stage is given, and their targets."""
        if self.rows is None:
            return x, self.targets
        return ops.embedding(self.rows, x.reshape(-1, x.shape[-1])), self.targets.reshape(-1)[self.rows]

    def spread(self, dy: Any, x: Any) -> Any:
        """Return the gradient by x, from the gradient by what the last stage was given."""
        if self.rows is None or dy is None:
            return dy
        dx = pool_of(device.in_use()).take(x.shape, dy.dtype)
        dx.fill(0)
        ops.embedding_backward(self.rows, dy, dx.reshape(-1, x.shape[-1]))
        return dx


class Pass:
    """The activations, saved values and gradients of one micro-batch; a rank without one passes x = None.

    keeps          whether a backward will follow: what it needs is kept in `saved`
    targets, scale, parts   as in `Objective`
    """

    def __init__(
        self,
        module: SharedStages,
        x: Any,
        *,
        keeps: bool = True,
        targets: Any = None,
        scale: float = 1.0,
        parts: Sequence[Any] = (...,),
    ) -> None:
        self.module, self.keeps, to_device = module, keeps, device.in_use().from_host
        self.contributors = module.comm.size
        self.is_idle = x is None
        documents = Documents(x.begins) if isinstance(x, Packed) else None
        self.batch = BatchContext(documents, module.factors() if keeps else {})
        self.x: Any = None if x is None else to_device(as_input(x))
        self.objective: Objective | None = None
        if targets is not None:
            rows = rows_that_count(targets) if len(parts) == 1 and parts[0] is ... else None
            on_device = None if rows is None else to_device(rows)
            self.objective = Objective(to_device(targets), scale, parts, on_device)
        self.saved: dict[int, Any] = {}
        self.dy: Any = None
        self.loss: Scalar | None = None
        self.losses: list[Scalar] = []

    def _given(self, stage: int, reads: bool = True) -> Given:
        """Return what a stage's layer is given beside its input; no weights where none are gathered."""
        self.batch.stage = stage
        return Given(self.module.weights_of(stage) if reads else {}, self.batch)

    def forward(self, stage: int) -> None:
        """Compute x of the next stage."""
        if self.is_idle:
            return
        layer, weights = self.module.stages[stage].layer, self._given(stage)
        with spans.computing("forward", self.module.stages[stage].scope):
            self.x, saved = layer.forward(weights, self.x)
        if self.keeps:
            self.saved[stage] = saved

    def loss_and_backward(self, stage: int) -> None:
        """Compute the loss and dy of the stage before; losses are scaled while gradients are low."""
        if self.is_idle:
            return
        layer, factor = self.module.stages[stage].layer, self.module.loss_scale.factor
        weights, gradients = self._given(stage), self.module.gradients_of(stage)
        assert self.objective is not None, "a loss has targets"
        with spans.computing("loss", self.module.stages[stage].scope):
            scale = self.objective.scale * factor
            loss, dy = loss_and_backward(layer, weights, *self.objective.of(self.x), scale, gradients)
            self.dy = self.objective.spread(dy, self.x)
        self.x, self.loss = None, loss / factor

    def evaluate(self, stage: int) -> None:
        """Compute the loss of each part alone; rows that no part has are never made into logits."""
        if self.is_idle:
            return
        layer, weights = self.module.stages[stage].layer, self._given(stage)
        assert self.objective is not None, "a loss has targets"
        with spans.computing("loss", self.module.stages[stage].scope):
            x, targets = self.objective.of(self.x)
            self.losses = [
                loss_alone(layer, weights, x[part], targets[part], self.objective.scale)
                for part in self.objective.parts
            ]

    def backward(self, stage: int) -> None:
        """Compute dy of the stage before; what was saved goes as soon as it is used."""
        if self.is_idle:
            return
        layer, saved = self.module.stages[stage].layer, self.saved.pop(stage)
        weights = self._given(stage, layer.backward_reads_params)
        gradients = self.module.gradients_of(stage)
        with spans.computing("backward", self.module.stages[stage].scope):
            self.dy = layer.backward(weights, saved, self.dy, gradients)

    def progress(self) -> None:
        """Push on the transfers in flight."""
        self.module.owners.progress()


def rows_that_count(targets: Any) -> Any:
    """Return the rows (K,) that a last stage is given: those whose targets count, and some others.

    K is a multiple of an eighth of all: few shapes mean few sizes of memory. None: all rows, as where targets
    lie on a GPU already.
    """
    if type(targets) is not np.ndarray:
        return None
    counts = targets.reshape(-1) != UNCOUNTED
    step = -(-counts.size // ROW_STEPS)
    most = -(-max(1, int(np.count_nonzero(counts))) // step) * step
    return np.sort(np.argsort(~counts, kind="stable")[:most]) if most < counts.size else None


def as_input(x: Any) -> Any:
    """Return `x` as layers compute with it, ids if it is `Packed`; raise ValueError for other things."""
    if isinstance(x, Packed):
        return x.ids
    if isinstance(x, str | bytes | list | Real):
        raise ValueError(f"forward: expected an array, got {came(x)}")
    return x
