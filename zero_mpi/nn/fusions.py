"""Optional fused operations of a layer besides forward and backward, and fallbacks for other layers.

A layer that writes its result itself can add a residual to it in the same pass. A last stage that computes
logits can compute the loss as well, so that not all logits exist at once. Callers use the functions here, so
a layer with only `forward` and `backward` works everywhere.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from zero_mpi import ops
from zero_mpi.device.arrays import Scalar
from zero_mpi.nn.layer import Gradients, Layer, Weights


class AddsInForward(Layer):
    """A layer whose forward adds `residual` where it writes y."""

    def forward(self, p: Weights, x: Any, residual: Any = None) -> tuple[Any, Any]:
        """Return (y, saved), or (residual + y, saved)."""
        raise NotImplementedError


class AddsInBackward(Layer):
    """A layer whose backward adds `residual` where it writes dx."""

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients, residual: Any = None) -> Any:
        """Return dx, or residual + dx; add the parameters' gradients into g."""
        raise NotImplementedError


def forward_onto(layer: Layer, p: Weights, x: Any, residual: Any) -> tuple[Any, Any]:
    """Return (residual + y, saved); None: no residual."""
    if residual is None:
        return layer.forward(p, x)
    if isinstance(layer, AddsInForward):
        return layer.forward(p, x, residual)
    y, saved = layer.forward(p, x)
    return ops.add(residual, y), saved


def backward_onto(layer: Layer, p: Weights, saved: Any, dy: Any, g: Gradients, residual: Any) -> Any:
    """Return residual + dx; None: no residual."""
    if residual is None:
        return layer.backward(p, saved, dy, g)
    if isinstance(layer, AddsInBackward):
        return layer.backward(p, saved, dy, g, residual)
    return ops.add(residual, layer.backward(p, saved, dy, g))


@runtime_checkable
class Head(Protocol):
    """A last stage that computes loss or gradients without all logits in memory."""

    def loss(self, p: Weights, x: Any, targets: Any, scale: float, g: Gradients) -> tuple[Scalar, Any]:
        """Return (loss, dx): forward, cross-entropy of y as logits, and backward, in one.

        The loss is `scale` times the sum over targets of -log softmax.
        """

    def evaluate(self, p: Weights, x: Any, targets: Any, scale: float) -> Scalar:
        """Return the loss; no backward follows."""


def loss_and_backward(
    layer: Layer, p: Weights, x: Any, targets: Any, scale: float, g: Gradients
) -> tuple[Scalar, Any]:
    """Return (loss, dx) of any layer as a head; see `Head.loss`."""
    if isinstance(layer, Head):
        return layer.loss(p, x, targets, scale, g)
    y, saved = layer.forward(p, x)
    loss, dy = ops.cross_entropy(y, targets, scale)
    return loss, layer.backward(p, saved, dy, g)


def loss_alone(layer: Layer, p: Weights, x: Any, targets: Any, scale: float) -> Scalar:
    """Return the loss of any layer as a head; at scale 0 the number of targets that are not the argmax."""
    if not scale:
        return (layer.forward(p, x)[0].argmax(-1) != targets).sum()
    if isinstance(layer, Head):
        return layer.evaluate(p, x, targets, scale)
    return ops.cross_entropy(layer.forward(p, x)[0], targets, scale)[0]
