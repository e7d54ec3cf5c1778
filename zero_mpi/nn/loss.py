"""Cross-entropy of next-token logits, as a function: the loss is where forward turns into backward."""

from __future__ import annotations

from zero_mpi import ops
from zero_mpi.arrays import Array


def cross_entropy(logits: Array, targets: Array, scale: float | None = None) -> tuple[float, Array]:
    """(loss, dlogits) for logits (..., V) and whole-number targets (...).

    The loss is `scale` times the sum over targets of -log softmax. `scale` is 1 over the number of targets
    of the *whole step*, on all ranks and micro-batches, so that gradients are summed and never divided;
    left out, it is 1 over the targets given here.
    """
    loss, dlogits = ops.cross_entropy(logits, targets, 1.0 / targets.size if scale is None else scale)
    return float(loss), dlogits
