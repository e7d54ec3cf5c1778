"""Layers made of layers: one after the other, with a shortcut, or computed twice to save memory."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from zero_mpi import ops
from zero_mpi.arrays import Scalar
from zero_mpi.nn.layer import Cache, Gradients, Layer, Param, Weights


class Chain(Layer):
    """y = last(... second(first(x)))."""

    def __init__(self, *layers: Layer) -> None:
        self.layers = layers
        self.backward_reads_params = any(layer.backward_reads_params for layer in layers)

    @cached_property
    def but_last(self) -> Chain:
        """All layers before the last one."""
        return Chain(*self.layers[:-1])

    @cached_property
    def but_first(self) -> Chain:
        """All layers after the first one."""
        return Chain(*self.layers[1:])

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

    def forward(self, p: Weights, x: Any) -> tuple[Any, Any]:
        saved = []
        for layer in self.layers:
            x, kept = layer.forward(p, x)
            saved.append(kept)
        return x, saved

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        for layer, kept in zip(reversed(self.layers), reversed(saved), strict=True):
            dy = layer.backward(p, kept, dy, g)
        return dy

    def forward_onto(self, p: Weights, x: Any, base: Any) -> tuple[Any, Any]:
        if not self.layers:
            return super().forward_onto(p, x, base)
        x, saved = self.but_last.forward(p, x)
        y, kept = self.layers[-1].forward_onto(p, x, base)
        return y, [*saved, kept]

    def backward_onto(self, p: Weights, saved: Any, dy: Any, g: Gradients, base: Any) -> Any:
        if not self.layers:
            return super().backward_onto(p, saved, dy, g, base)
        dy = self.but_first.backward(p, saved[1:], dy, g)
        return self.layers[0].backward_onto(p, saved[0], dy, g, base)

    def loss(self, p: Weights, x: Any, targets: Any, scale: float, g: Gradients) -> tuple[Scalar, Any]:
        if not self.layers:
            return super().loss(p, x, targets, scale, g)
        y, saved = self.but_last.forward(p, x)
        loss, dy = self.layers[-1].loss(p, y, targets, scale, g)
        return loss, self.but_last.backward(p, saved, dy, g)

    def evaluate(self, p: Weights, x: Any, targets: Any, scale: float) -> Scalar:
        if not self.layers:
            return super().evaluate(p, x, targets, scale)
        y, _ = self.but_last.forward(p, x)
        return self.layers[-1].evaluate(p, y, targets, scale)

    def infer(self, p: Weights, x: Any, cache: Cache) -> Any:
        for layer in self.layers:
            x = layer.infer(p, x, cache)
        return x


class Wrapper(Layer):
    """A layer around one other layer, whose parameters are its own."""

    def __init__(self, inner: Layer) -> None:
        self.inner = inner
        self.backward_reads_params = inner.backward_reads_params

    def params(self) -> dict[str, Param]:
        return self.inner.params()


class Residual(Wrapper):
    """y = x + inner(x)."""

    def forward(self, p: Weights, x: Any) -> tuple[Any, Any]:
        return self.inner.forward_onto(p, x, x)

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        return self.inner.backward_onto(p, saved, dy, g, dy)

    def infer(self, p: Weights, x: Any, cache: Cache) -> Any:
        return ops.add(x, self.inner.infer(p, x, cache))


class Recompute(Wrapper):
    """inner(x), which keeps only x and runs forward again inside backward.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. The second run has the same bits.
    """

    def __init__(self, inner: Layer) -> None:
        super().__init__(inner)
        self.backward_reads_params = bool(inner.params())

    def forward(self, p: Weights, x: Any) -> tuple[Any, Any]:
        return self.inner.forward(p, x)[0], x

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        kept = self.inner.forward(p, saved)[1]
        return self.inner.backward(p, kept, dy, g)

    def loss(self, p: Weights, x: Any, targets: Any, scale: float, g: Gradients) -> tuple[Scalar, Any]:
        return self.inner.loss(p, x, targets, scale, g)  # backward follows at once: nothing to save

    def evaluate(self, p: Weights, x: Any, targets: Any, scale: float) -> Scalar:
        return self.inner.evaluate(p, x, targets, scale)

    def infer(self, p: Weights, x: Any, cache: Cache) -> Any:
        return self.inner.infer(p, x, cache)
