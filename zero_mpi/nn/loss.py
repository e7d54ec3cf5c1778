"""Cross-entropy of next-token logits, as a function: the loss is where forward turns into backward."""

from __future__ import annotations

from dataclasses import dataclass

from zero_mpi import ops
from zero_mpi.arrays import Array, Scalar, beside


def cross_entropy(logits: Array, targets: Array, scale: float | None = None) -> tuple[Scalar, Array]:
    """(loss, dlogits) for logits (..., V) and whole-number targets (...).

    The loss is `scale` times the sum over targets of -log softmax. `scale` is 1 over the number of targets
    of the *whole step*, on all ranks and micro-batches, so that gradients are summed and never divided;
    left out, it is 1 over the targets given here.
    """
    scale = 1.0 / targets.size if scale is None else scale
    loss, dlogits = ops.cross_entropy(logits, beside(targets, logits), scale)
    return loss, dlogits


@dataclass(frozen=True, eq=False)
class CrossEntropy:
    """The loss of a micro-batch: called with logits it is `cross_entropy`.

    As an object it also tells targets and scale, so that a model whose last layer makes the logits can take
    them in pieces (`ShardedModule.forward_backward`).
    """

    targets: Array
    scale: float

    def __call__(self, logits: Array) -> tuple[Scalar, Array]:
        """(loss, dlogits)."""
        return cross_entropy(logits, self.targets, self.scale)
