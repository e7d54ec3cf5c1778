"""Cross-entropy of next-token logits, as a function: the loss is where forward turns into backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zero_mpi import ops
from zero_mpi.arguments import FLOATING, UNCOUNTED, WHOLE, array, number
from zero_mpi.device import is_cupy
from zero_mpi.device.arrays import Scalar, beside
from zero_mpi.device.types import Array


def cross_entropy(logits: Array, targets: Array, scale: float | None = None) -> tuple[Scalar, Array]:
    """Return (loss, dlogits) for logits (..., V) and integer targets (...).

    The loss is `scale` times the sum over targets of -log softmax. `scale` is 1 over the number of targets
    of the *full step*, on all ranks and micro-batches, so that gradients are summed and never divided;
    left out, it is 1 over the targets given here. A target of -1 does not count: it has no loss.
    """
    check_targets(targets, logits)
    if scale is None:
        scale = 1.0 / max(1, int((targets != UNCOUNTED).sum()))
    scale = number("cross_entropy: scale", scale)
    loss, dlogits = ops.cross_entropy(logits, beside(targets, logits), scale)
    return loss, dlogits


def check_targets(targets: Any, logits: Any = None) -> None:
    """Raise ValueError unless targets are integers, one for each row of logits if these are known."""
    array("cross_entropy: targets", targets, kinds=WHOLE)
    if targets.size == 0:
        raise ValueError("cross_entropy: expected at least one target, got an array without elements")
    if logits is not None:
        array("cross_entropy: logits", logits, kinds=FLOATING)
        array("cross_entropy: targets for these logits", targets, tuple(logits.shape[:-1]))
        if not is_cupy(targets) and not UNCOUNTED <= targets.min() <= targets.max() < logits.shape[-1]:
            raise ValueError(
                f"cross_entropy: expected targets from 0 to {logits.shape[-1] - 1}, an index of the logits, "
                f"or -1 to ignore a position; got {targets.min()} to {targets.max()}"
            )


@dataclass(frozen=True, eq=False)
class CrossEntropy:
    """The loss of a micro-batch: called with logits it is `cross_entropy`.

    The object also holds targets and scale, so that a model whose last layer computes the logits can do so
    in chunks (`ShardedModule.forward_backward`). If some targets are -1, that layer gets few rows beyond
    those that count: it must treat each row independently.
    """

    targets: Array
    scale: float

    def __post_init__(self) -> None:
        check_targets(self.targets)
        number("CrossEntropy: scale", self.scale)

    def __call__(self, logits: Array) -> tuple[Scalar, Array]:
        """Return (loss, dlogits): the loss and its gradient."""
        return cross_entropy(logits, self.targets, self.scale)
