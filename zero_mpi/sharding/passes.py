"""A micro-batch on its way through the stages of a module: what the actions that compute read and write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Protocol

from zero_mpi import device
from zero_mpi.arguments import came
from zero_mpi.comm import Comm
from zero_mpi.device.arrays import Scalar
from zero_mpi.device.types import Array
from zero_mpi.nn.fusions import loss_alone, loss_and_backward
from zero_mpi.nn.layer import Stage
from zero_mpi.sharding.loss_scale import LossScale
from zero_mpi.sharding.parameters import Views
from zero_mpi.telemetry import spans


class SharedStages(Protocol):
    """What a micro-batch asks of the module that it goes through."""

    owners: Comm
    loss_scale: LossScale

    @property
    def comm(self) -> Comm:
        """The transport between all ranks."""

    @property
    def stages(self) -> Sequence[Stage]:
        """The stages, in order."""

    def weights_of(self, stage: int) -> Views:
        """The gathered parameters of a stage, by name."""

    def gradients_of(self, stage: int) -> Views:
        """The gradients that a stage's backward adds to, by name."""


class Pass:
    """The activations, saved values and gradients of one micro-batch; a rank without one passes x = None.

    keeps          whether a backward will follow: what it needs is kept in `saved`
    targets, scale of the cross-entropy that the last stage takes together with its forward
    parts          indices of targets: where no backward follows, each part has a loss of its own
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
        self.module, self.keeps, self.scale, self.parts = module, keeps, scale, parts
        self.contributors = module.comm.size
        self.is_idle = x is None
        self.x: Any = None if x is None else device.in_use().from_host(as_input(x))
        self.targets: Any = None if targets is None else device.in_use().from_host(targets)
        self.saved: dict[int, Any] = {}
        self.dy: Any = None
        self.loss: Scalar | None = None
        self.losses: list[Scalar] = []

    def forward(self, stage: int) -> None:
        """Compute x of the next stage."""
        if self.is_idle:
            return
        layer, weights = self.module.stages[stage].layer, self.module.weights_of(stage)
        with spans.computing("forward", self.module.stages[stage].scope):
            self.x, saved = layer.forward(weights, self.x)
        if self.keeps:
            self.saved[stage] = saved

    def loss_and_backward(self, stage: int) -> None:
        """Compute the loss and dy of the stage before; losses are scaled while gradients are low."""
        if self.is_idle:
            return
        layer, factor = self.module.stages[stage].layer, self.module.loss_scale.factor
        weights, gradients = self.module.weights_of(stage), self.module.gradients_of(stage)
        with spans.computing("loss", self.module.stages[stage].scope):
            scale = self.scale * factor
            loss, self.dy = loss_and_backward(layer, weights, self.x, self.targets, scale, gradients)
        self.x, self.loss = None, loss / factor

    def evaluate(self, stage: int) -> None:
        """Compute the loss of each part alone; what no part has is never made into logits."""
        if self.is_idle:
            return
        layer, weights = self.module.stages[stage].layer, self.module.weights_of(stage)
        with spans.computing("loss", self.module.stages[stage].scope):
            self.losses = [
                loss_alone(layer, weights, self.x[part], self.targets[part], self.scale)
                for part in self.parts
            ]

    def backward(self, stage: int) -> None:
        """Compute dy of the stage before; what was saved goes as soon as it is used."""
        if self.is_idle:
            return
        layer, saved = self.module.stages[stage].layer, self.saved.pop(stage)
        weights = self.module.weights_of(stage) if layer.backward_reads_params else {}
        gradients = self.module.gradients_of(stage)
        with spans.computing("backward", self.module.stages[stage].scope):
            self.dy = layer.backward(weights, saved, self.dy, gradients)

    def progress(self) -> None:
        """Push on the transfers in flight."""
        self.module.owners.progress()


class GivenGradients(Pass):
    """A micro-batch whose gradients were computed elsewhere: backward only adds them, each once."""

    def __init__(self, module: SharedStages, gradients: Mapping[str, Array] | None) -> None:
        super().__init__(module, None)
        self.left = dict(gradients or {})

    def backward(self, stage: int) -> None:
        """Add those of all units that the stage uses: one is reduced after the last stage that uses it."""
        factor = self.module.loss_scale.factor
        for name, total in self.module.gradients_of(stage).items() if self.left else ():
            if name in self.left:
                given = device.in_use().from_host(self.left.pop(name))
                total += (given * factor).astype(total.dtype)


def as_input(x: Any) -> Any:
    """`x`, which layers compute with; raises ValueError for what no layer can."""
    if isinstance(x, str | bytes | list | Real):
        raise ValueError(f"forward: expected an array, got {came(x)}")
    return x
