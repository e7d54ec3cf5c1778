"""Layers made of layers: a sequence, a residual connection, or a layer recomputed to save memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from zero_mpi import ops
from zero_mpi.device.arrays import Scalar
from zero_mpi.nn.fusions import (
    AddsInBackward,
    AddsInForward,
    backward_onto,
    forward_onto,
    loss_alone,
    loss_and_backward,
)
from zero_mpi.nn.generation import Cache, infer
from zero_mpi.nn.layer import Composite, Gradients, Layer, Param, Stack, Weights, preserving


class Chain(Composite, AddsInForward, AddsInBackward):
    """y = last(... second(first(x)))."""

    def __init__(self, *layers: Layer) -> None:
        if not layers:
            raise ValueError("a chain needs at least one layer")
        for before, layer, after in zip((None, *layers), layers, (*layers[1:], None), strict=False):
            if before is None or after is None or before.keeps_results or after.keeps_results:
                preserving(layer)
        self.layers = layers
        self.backward_reads_params = any(layer.backward_reads_params for layer in layers)

    @cached_property
    def but_last(self) -> Chain | None:
        """A chain of all layers before the last one, if there are any."""
        return Chain(*self.layers[:-1]) if self.layers[1:] else None

    def parts(self) -> Sequence[Layer]:
        return self.layers

    def params(self) -> dict[str, Param]:
        found: dict[str, Param] = {}
        for layer in self.layers:
            for name, param in layer.params().items():
                if found.setdefault(name, param).shape != param.shape:
                    raise ValueError(
                        f"parameter {name} comes twice in a chain, as {found[name].shape} and {param.shape}: "
                        "give one of the layers another name"
                    )
        return found

    def forward(self, p: Weights, x: Any, residual: Any = None) -> tuple[Any, Any]:
        saved = []
        for layer, onto in zip(self.layers, self._at_end(residual), strict=True):
            x, kept = forward_onto(layer, p, x, onto)
            saved.append(kept)
        return x, saved

    def saved(self, p: Weights, x: Any) -> Any:
        found = []
        for layer in self.layers[:-1]:
            x, kept = layer.forward(p, x)
            found.append(kept)
        return [*found, self.layers[-1].saved(p, x)]

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients, residual: Any = None) -> Any:
        for layer, kept, onto in zip(
            reversed(self.layers), reversed(saved), self._at_end(residual), strict=True
        ):
            dy = backward_onto(layer, p, kept, dy, g, onto)
        return dy

    def _at_end(self, residual: Any) -> list[Any]:
        """Return a list of residuals per layer: the layer that computes last adds the residual."""
        return [None] * (len(self.layers) - 1) + [residual]

    def loss(self, p: Weights, x: Any, targets: Any, scale: float, g: Gradients) -> tuple[Scalar, Any]:
        if self.but_last is None:
            return loss_and_backward(self.layers[-1], p, x, targets, scale, g)
        y, saved = self.but_last.forward(p, x)
        loss, dy = loss_and_backward(self.layers[-1], p, y, targets, scale, g)
        return loss, self.but_last.backward(p, saved, dy, g)

    def evaluate(self, p: Weights, x: Any, targets: Any, scale: float) -> Scalar:
        y = x if self.but_last is None else self.but_last.forward(p, x)[0]
        return loss_alone(self.layers[-1], p, y, targets, scale)

    def infer(self, p: Weights, x: Any, cache: Cache) -> Any:
        for layer in self.layers:
            x = infer(layer, p, x, cache)
        return x


class Wrapper(Composite):
    """A layer around one other layer, with the parameters of that layer."""

    def __init__(self, inner: Layer) -> None:
        self.inner = preserving(inner)
        self.backward_reads_params = inner.backward_reads_params

    def parts(self) -> Sequence[Layer]:
        return [self.inner]


class Residual(Wrapper):
    """y = x + inner(x)."""

    def forward(self, p: Weights, x: Any) -> tuple[Any, Any]:
        return forward_onto(self.inner, p, x, x)

    def saved(self, p: Weights, x: Any) -> Any:
        return self.inner.saved(p, x)

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        return backward_onto(self.inner, p, saved, dy, g, dy)

    def infer(self, p: Weights, x: Any, cache: Cache) -> Any:
        return ops.add(x, infer(self.inner, p, x, cache))


class Recompute(Wrapper):
    """inner(x): it saves only x, and backward computes again what it needs (activation checkpointing).

    Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. Bits are the same.
    """

    def __init__(self, inner: Layer) -> None:
        super().__init__(inner)
        self.backward_reads_params = bool(inner.params())

    def stacks(self) -> list[Stack]:
        return [Stack(names, again + 1) for names, again in self.inner.stacks()]

    def forward(self, p: Weights, x: Any) -> tuple[Any, Any]:
        return self.inner.forward(p, x)[0], x

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        return self.inner.backward(p, self.inner.saved(p, saved), dy, g)

    def loss(self, p: Weights, x: Any, targets: Any, scale: float, g: Gradients) -> tuple[Scalar, Any]:
        """Return (loss, dx) without recomputing, as backward follows at once; see `fusions.Head.loss`."""
        return loss_and_backward(self.inner, p, x, targets, scale, g)

    def evaluate(self, p: Weights, x: Any, targets: Any, scale: float) -> Scalar:
        return loss_alone(self.inner, p, x, targets, scale)

    def infer(self, p: Weights, x: Any, cache: Cache) -> Any:
        return infer(self.inner, p, x, cache)
