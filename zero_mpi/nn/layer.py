"""Definition of a layer: it names its parameters, has a forward and a backward, and holds no arrays.

Every other method has a default that works for all layers; a layer overrides the methods that it can do in
fewer passes or with less memory.

Weights are an argument of `forward` and `backward`, so the runtime may free them after forward and
gather them again for backward. Backward *adds* into the gradients it is given: accumulation, tied
weights and flat gradient buffers then need no more code. Parameter names are GGUF's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from zero_mpi import ops
from zero_mpi.arguments import came, instance, number, whole
from zero_mpi.device.arrays import Scalar, namespace
from zero_mpi.device.types import Array

Weights = Mapping[str, Array]
Gradients = MutableMapping[str, Array]
INITS = ("normal", "ones", "zeros")


@dataclass(frozen=True)
class Param:
    """A parameter: its shape and initialization: "normal" with `std`, "ones" or "zeros".

    buffer: it has no gradient, and `Layer.update` sets it after a step
    """

    shape: tuple[int, ...]
    init: str = "normal"
    std: float = 0.02
    buffer: bool = False

    @property
    def size(self) -> int:
        """The number of its elements."""
        return prod(self.shape)

    @property
    def decays(self) -> bool:
        """True if weight decay applies: to matrices, not to norms and biases."""
        return len(self.shape) >= 2


@dataclass(frozen=True)
class Tally:
    """Numbers that forward reports of each micro-batch (`BatchContext.report`); layers may share a name.

    scale   factor of an auxiliary loss in the objective, a mean over micro-batches; None: no loss but a sum
    value   function that makes the number of a micro-batch of all its sums by name; None: the sum itself
    """

    shape: tuple[int, ...] = ()
    scale: float | None = None
    value: Callable[[Mapping[str, Any]], Any] | None = None


class Stack(NamedTuple):
    """Parameters of one first dimension, of which a layer needs a part at a time (`batch.turns`).

    again   how often the layer's forward runs once more before its backward
    """

    names: tuple[str, ...]
    again: int = 0


@dataclass
class Cache:
    """State of generation between calls: the number of positions done, and keys and values per layer."""

    position: int = 0
    entries: dict[int, Any] = field(default_factory=dict)

    def extend(self, layer: Layer, k: Any, v: Any, stop: int) -> tuple[Any, Any]:
        """Return arrays for `stop` keys and values of a layer like k and v (B, T, ...), with those stored."""
        stored = self.entries.get(id(layer))
        if stored is None or stored[0].shape[1] < stop:
            grown = tuple(namespace(k).zeros((x.shape[0], 2 * stop, *x.shape[2:]), x.dtype) for x in (k, v))
            if stored is not None:
                for new, old in zip(grown, stored, strict=True):
                    new[:, : old.shape[1]] = old
            stored = self.entries[id(layer)] = grown
        return stored


class Layer:
    """Base of all layers.

    `saved` is any value that backward needs from forward; it must not hold arrays of `p`. A parameter that
    is missing in `g` is frozen: its gradient is not computed.

    A layer that overwrites its x and dy saves memory and a pass. A `Chain` lets a layer do so (`overwriting`)
    between two layers that keep neither the y of their forward nor the dx of their backward.
    """

    keeps_results = True
    backward_reads_params = True  # False: a sharded unit need not be gathered for this layer's backward

    def params(self) -> dict[str, Param]:
        """Return name -> Param, in the order of the file."""
        return {}

    def stacks(self) -> list[Stack]:
        """Return the parameters that forward and backward take by `turns`: once in each run."""
        return []

    def tallies(self) -> dict[str, Tally]:
        """Return name -> Tally of what forward reports: auxiliary losses, and what `update` needs."""
        return {}

    def update(self, buffers: MutableMapping[str, Array], sums: Mapping[str, Array]) -> None:
        """Set this layer's buffers (on the host) after a step, by the sums of tallies: alike on all ranks."""

    def overwriting(self) -> Layer:
        """Return a copy of the layer that overwrites its x and dy, or the layer if it never does."""
        return self

    def forward(self, p: Weights, x: Any) -> tuple[Any, Any]:
        """Return (y, saved): the output, and the values that backward needs."""
        raise NotImplementedError

    def saved(self, p: Weights, x: Any) -> Any:
        """Return the values that backward needs, alone: forward without products that only y needs."""
        return self.forward(p, x)[1]

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        """Return dx; add the parameters' gradients into g. x and dy are not changed."""
        raise NotImplementedError

    def forward_onto(self, p: Weights, x: Any, residual: Any) -> tuple[Any, Any]:
        """Return (residual + y, saved); None: no residual."""
        y, saved = self.forward(p, x)
        return y if residual is None else ops.add(residual, y), saved

    def backward_onto(self, p: Weights, saved: Any, dy: Any, g: Gradients, residual: Any) -> Any:
        """Return residual + dx; None: no residual."""
        dx = self.backward(p, saved, dy, g)
        return dx if residual is None else ops.add(residual, dx)

    def loss(self, p: Weights, x: Any, targets: Any, scale: float, g: Gradients) -> tuple[Scalar, Any]:
        """Return (loss, dx) of a last stage: forward, cross-entropy of y as logits, and backward, in one.

        The loss is `scale` times the sum over targets of -log softmax.
        """
        y, saved = self.forward(p, x)
        loss, dy = ops.cross_entropy(y, targets, scale)
        return loss, self.backward(p, saved, dy, g)

    def evaluate(self, p: Weights, x: Any, targets: Any, scale: float) -> Scalar:
        """Return the loss alone; at scale 0 the number of targets that are not the argmax."""
        y = self.forward(p, x)[0]
        return ops.cross_entropy(y, targets, scale)[0] if scale else (y.argmax(-1) != targets).sum()

    def infer(self, p: Weights, x: Any, cache: Cache) -> Any:
        """Return y of the positions after those in `cache`.

        A layer has its own if its result at a position depends on other positions or on its number.
        """
        return self.forward(p, x)[0]


class AddsInForward(Layer):
    """A layer whose forward adds `residual` where it writes y, in the same pass."""

    def forward(self, p: Weights, x: Any, residual: Any = None) -> tuple[Any, Any]:
        """Return (y, saved), or (residual + y, saved)."""
        raise NotImplementedError

    def forward_onto(self, p: Weights, x: Any, residual: Any) -> tuple[Any, Any]:
        return self.forward(p, x, residual)


class AddsInBackward(Layer):
    """A layer whose backward adds `residual` where it writes dx, in the same pass."""

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients, residual: Any = None) -> Any:
        """Return dx, or residual + dx; add the parameters' gradients into g."""
        raise NotImplementedError

    def backward_onto(self, p: Weights, saved: Any, dy: Any, g: Gradients, residual: Any) -> Any:
        return self.backward(p, saved, dy, g, residual)


class Composite(Layer):
    """A layer made of others, with the parameters of those layers."""

    def parts(self) -> Sequence[Layer]:
        """Return the layers that it is made of, in the order of their parameters."""
        raise NotImplementedError

    def params(self) -> dict[str, Param]:
        return params_of(self.parts())

    def stacks(self) -> list[Stack]:
        return [stack for part in self.parts() for stack in part.stacks()]

    def tallies(self) -> dict[str, Tally]:
        return {name: tally for part in self.parts() for name, tally in part.tallies().items()}

    def update(self, buffers: MutableMapping[str, Array], sums: Mapping[str, Array]) -> None:
        for part in self.parts():
            part.update(buffers, sums)


@dataclass(frozen=True)
class Stage:
    """One step of a model: a layer, and the scope (name prefix) whose parameters are gathered together."""

    scope: str
    layer: Layer


def stage_params(stages: list[Stage]) -> dict[str, Param]:
    """Return all parameters of a model in order; raise ValueError for invalid ones."""
    params = params_of(stage.layer for stage in stages)
    for name, param in params.items():
        check_param(name, param)
    return params


def params_of(layers: Iterable[Layer]) -> dict[str, Param]:
    """Return the parameters of layers in order, a tied one only at its first place.

    Raise ValueError if a name comes with two shapes: one of the layers needs another name.
    """
    params: dict[str, Param] = {}
    for layer in layers:
        for name, param in layer.params().items():
            first = params.setdefault(name, param)
            if first is not param and first.shape != param.shape:
                raise ValueError(f"parameter {name} has the shapes {first.shape} and {param.shape}")
    return params


def check_param(name: Any, param: Any) -> None:
    """Raise ValueError for an invalid parameter."""
    instance("a parameter's name", name, str, "a text")
    instance(f"parameter {name}", param, Param, "Param(shape)")
    if not isinstance(param.shape, tuple) or not param.shape:
        raise ValueError(
            f"parameter {name}: expected a shape of at least one dimension, such as (1,) for a single "
            f"number, got {came(param.shape)}"
        )
    for length in param.shape:
        whole(f"parameter {name}: shape {param.shape}", length, least=1)
    if param.init not in INITS:
        raise ValueError(
            f"parameter {name}: init {came(param.init)} is not known; expected normal, ones or zeros"
        )
    number(f"parameter {name}: std", param.std, least=0)
