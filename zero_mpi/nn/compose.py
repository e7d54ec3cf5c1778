"""Layers made of other layers: a sequence, a residual connection, or a layer recomputed to save memory."""

from collections.abc import Sequence
from typing import Any

from zero_mpi import ops
from zero_mpi.device.arrays import Scalar
from zero_mpi.nn.layer import (
    AddsInBackward,
    AddsInForward,
    Cache,
    Composite,
    Gradients,
    Layer,
    Stack,
    Weights,
)


class Chain(Composite, AddsInForward, AddsInBackward):
    """Layer y = last(... second(first(x)))."""

    def __init__(self, *layers: Layer) -> None:
        if not layers:
            raise ValueError("a chain needs at least one layer")
        flags = [True, *(layer.keeps_results for layer in layers), True]  # callers may keep x and y
        triples = zip(flags, layers, flags[2:], strict=False)
        self.layers = [x if before or after else x.overwriting() for before, x, after in triples]
        self.backward_reads_params = any(layer.backward_reads_params for layer in layers)

    def parts(self) -> Sequence[Layer]:
        return self.layers

    def _before_last(self, p: Weights, x: Any) -> tuple[Any, list[Any]]:
        """Return the input of the last layer, and the saved values of the layers before it."""
        saved = []
        for layer in self.layers[:-1]:
            x, activations = layer.forward(p, x)
            saved.append(activations)
        return x, saved

    def forward(self, p: Weights, x: Any, residual: Any = None) -> tuple[Any, Any]:
        x, saved = self._before_last(p, x)
        y, activations = self.layers[-1].forward_onto(p, x, residual)
        return y, [*saved, activations]

    def saved(self, p: Weights, x: Any) -> Any:
        x, saved = self._before_last(p, x)
        return [*saved, self.layers[-1].saved(p, x)]

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients, residual: Any = None) -> Any:
        for layer, activations in zip(self.layers[:0:-1], saved[:0:-1], strict=True):
            dy = layer.backward(p, activations, dy, g)
        return self.layers[0].backward_onto(p, saved[0], dy, g, residual)

    def loss(self, p: Weights, x: Any, targets: Any, scale: float, g: Gradients) -> tuple[Scalar, Any]:
        x, saved = self._before_last(p, x)
        loss, dx = self.layers[-1].loss(p, x, targets, scale, g)
        for layer, activations in zip(reversed(self.layers[:-1]), reversed(saved), strict=True):
            dx = layer.backward(p, activations, dx, g)
        return loss, dx

    def evaluate(self, p: Weights, x: Any, targets: Any, scale: float) -> Scalar:
        return self.layers[-1].evaluate(p, self._before_last(p, x)[0], targets, scale)

    def infer(self, p: Weights, x: Any, cache: Cache) -> Any:
        for layer in self.layers:
            x = layer.infer(p, x, cache)
        return x


class Wrapper(Composite):
    """Base class of a layer around one inner layer, with the inner layer's parameters."""

    def __init__(self, inner: Layer) -> None:
        self.inner = inner
        self.backward_reads_params = inner.backward_reads_params

    def parts(self) -> Sequence[Layer]:
        return [self.inner]


class Residual(Wrapper):
    """Layer y = x + inner(x)."""

    def forward(self, p: Weights, x: Any) -> tuple[Any, Any]:
        return self.inner.forward_onto(p, x, x)

    def saved(self, p: Weights, x: Any) -> Any:
        return self.inner.saved(p, x)

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        return self.inner.backward_onto(p, saved, dy, g, dy)

    def infer(self, p: Weights, x: Any, cache: Cache) -> Any:
        return ops.add(x, self.inner.infer(p, x, cache))


class Recompute(Wrapper):
    """Layer inner(x) that saves only x; backward recomputes other values (activation checkpointing).

    Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. Results are bit-identical.
    """

    def __init__(self, inner: Layer) -> None:
        super().__init__(inner)
        self.backward_reads_params = bool(inner.params())

    def stacks(self) -> list[Stack]:
        return [Stack(names, repeats + 1) for names, repeats in self.inner.stacks()]

    def forward(self, p: Weights, x: Any) -> tuple[Any, Any]:
        return self.inner.forward(p, x)[0], x

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        return self.inner.backward(p, self.inner.saved(p, saved), dy, g)

    def loss(self, p: Weights, x: Any, targets: Any, scale: float, g: Gradients) -> tuple[Scalar, Any]:
        """Return (loss, dx) without recomputation, because backward follows immediately."""
        return self.inner.loss(p, x, targets, scale, g)

    def evaluate(self, p: Weights, x: Any, targets: Any, scale: float) -> Scalar:
        return self.inner.evaluate(p, x, targets, scale)

    def infer(self, p: Weights, x: Any, cache: Cache) -> Any:
        return self.inner.infer(p, x, cache)
