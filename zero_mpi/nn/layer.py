"""Base class of layers: a layer names its parameters, has a forward and a backward, and holds no arrays.

All other methods have defaults. A layer overrides a method if the default does not fit, or if it can compute
the result in fewer passes or with less memory.

Weights are an argument of `forward` and `backward`, so the runtime may free them after forward and gather
them again for backward. Backward *adds* into the gradients that it receives, so accumulation, tied weights
and flat gradient buffers need no additional code. Parameter names are GGUF's names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np

from zero_mpi import ops
from zero_mpi.arguments import came, instance, number, whole
from zero_mpi.device.arrays import Scalar, namespace
from zero_mpi.device.types import Array
from zero_mpi.ops.elementary import normals

Weights = Mapping[str, Array]
Gradients = MutableMapping[str, Array]
INITS = ("normal", "ones", "zeros")
DRAW_BLOCK = 1 << 16  # number of initial values that are drawn together


@dataclass(frozen=True)
class Param:
    """A parameter's shape and its initialization: "normal" with `std`, "ones" or "zeros".

    buffer: True for a parameter without gradient, which `Layer.update` sets after a step
    """

    shape: tuple[int, ...]
    init: str = "normal"
    std: float = 0.02
    buffer: bool = False

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def decays(self) -> bool:
        """True if weight decay applies: to matrices, but not to norms and biases."""
        return len(self.shape) >= 2


@dataclass(frozen=True)
class Tally:
    """Numbers that forward reports for each micro-batch (`BatchContext.report`); layers may share a name.

    scale   factor of an auxiliary loss, which is averaged over micro-batches; None: not a loss, but a sum
    value   function that computes a micro-batch's number from its sums by name; None: the sum itself
    """

    shape: tuple[int, ...] = ()
    scale: float | None = None
    value: Callable[[Mapping[str, Any]], Any] | None = None


class Stack(NamedTuple):
    """Parameters with a common first dimension, of which a layer needs one part at a time (`batch.turns`).

    again   how many more times the layer's forward runs before its backward
    """

    names: tuple[str, ...]
    again: int = 0


@dataclass
class Cache:
    """State of generation between calls: number of finished positions, and each layer's keys and values."""

    position: int = 0
    entries: dict[int, Any] = field(default_factory=dict)

    def extend(self, layer: Layer, k: Any, v: Any, stop: int) -> tuple[Any, Any]:
        """Return a layer's keys and values so far, in arrays like k and v with at least `stop` positions."""
        entry = self.entries.get(id(layer))
        if entry is None or entry[0].shape[1] < stop:
            arrays = tuple(namespace(k).zeros((x.shape[0], 2 * stop, *x.shape[2:]), x.dtype) for x in (k, v))
            if entry is not None:
                for new, old in zip(arrays, entry, strict=True):
                    new[:, : old.shape[1]] = old
            entry = self.entries[id(layer)] = arrays
        return entry


class Layer:
    """Base class of all layers.

    `saved` is any value that backward needs from forward; it must not hold arrays of `p`. A parameter that is
    missing in `g` is frozen, so its gradient is not computed.

    A layer that overwrites its x and dy saves memory and memory traffic. A `Chain` allows this
    (`overwriting`) for a layer between two layers that keep neither their y nor their dx.
    """

    keeps_results = True
    backward_reads_params = True  # False: a sharded unit need not be gathered for this layer's backward

    def params(self) -> dict[str, Param]:
        """Return name -> Param, in the order of the file."""
        return {}

    def stacks(self) -> list[Stack]:
        """Return the parameters that forward and backward take part by part, in one loop over `turns`."""
        return []

    def tallies(self) -> dict[str, Tally]:
        """Return name -> Tally for the values that forward reports: auxiliary losses, inputs of `update`."""
        return {}

    def update(self, buffers: MutableMapping[str, Array], sums: Mapping[str, Array]) -> None:
        """Set this layer's buffers (host arrays) after a step, from the sums of tallies over all ranks."""

    def overwriting(self) -> Layer:
        """Return a copy of the layer that may overwrite its x and dy, or the layer if it never does."""
        return self

    def forward(self, p: Weights, x: Any) -> tuple[Any, Any]:
        """Return (y, saved): the output, and the values that backward needs."""
        raise NotImplementedError

    def saved(self, p: Weights, x: Any) -> Any:
        """Return only the values that backward needs; skip products that only y needs."""
        return self.forward(p, x)[1]

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        """Return dx; add the parameters' gradients into g. Only an `overwriting` layer changes x or dy."""
        raise NotImplementedError

    def forward_onto(self, p: Weights, x: Any, residual: Any) -> tuple[Any, Any]:
        """Return (residual + y, saved), or (y, saved) if residual is None."""
        y, saved = self.forward(p, x)
        return y if residual is None else ops.add(residual, y), saved

    def backward_onto(self, p: Weights, saved: Any, dy: Any, g: Gradients, residual: Any) -> Any:
        """Return residual + dx, or dx if residual is None."""
        dx = self.backward(p, saved, dy, g)
        return dx if residual is None else ops.add(residual, dx)

    def loss(self, p: Weights, x: Any, targets: Any, scale: float, g: Gradients) -> tuple[Scalar, Any]:
        """Return (loss, dx) of a last stage: forward, cross-entropy of y as logits, and backward together.

        The loss is `scale` times the sum over targets of -log softmax.
        """
        y, saved = self.forward(p, x)
        loss, dy = ops.cross_entropy(y, targets, scale)
        return loss, self.backward(p, saved, dy, g)

    def evaluate(self, p: Weights, x: Any, targets: Any, scale: float) -> Scalar:
        """Return only the loss; at scale 0, the number of targets that are not the argmax."""
        y = self.forward(p, x)[0]
        return ops.cross_entropy(y, targets, scale)[0] if scale else (y.argmax(-1) != targets).sum()

    def infer(self, p: Weights, x: Any, cache: Cache) -> Any:
        """Return y at the positions after those in `cache`.

        A layer overrides `infer` if its result at a position depends on its index or on other positions.
        """
        return self.forward(p, x)[0]


class AddsInForward(Layer):
    """Base class of a layer whose forward can add `residual` to y in the pass that writes y."""

    def forward(self, p: Weights, x: Any, residual: Any = None) -> tuple[Any, Any]:
        """Return (y, saved), with `residual` added to y if it is given."""
        raise NotImplementedError

    def forward_onto(self, p: Weights, x: Any, residual: Any) -> tuple[Any, Any]:
        return self.forward(p, x, residual)


class AddsInBackward(Layer):
    """Base class of a layer whose backward can add `residual` to dx in the pass that writes dx."""

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients, residual: Any = None) -> Any:
        """Return dx, with `residual` added if it is given; add the parameters' gradients into g."""
        raise NotImplementedError

    def backward_onto(self, p: Weights, saved: Any, dy: Any, g: Gradients, residual: Any) -> Any:
        return self.backward(p, saved, dy, g, residual)


class Composite(Layer):
    """Base class of a layer made of other layers, with their parameters."""

    def parts(self) -> Sequence[Layer]:
        """Return the inner layers, in the order of their parameters."""
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
    """Return all parameters of a model in order; raise ValueError for invalid parameters."""
    params = params_of(stage.layer for stage in stages)
    for name, param in params.items():
        check_param(name, param)
    return params


def params_of(layers: Iterable[Layer]) -> dict[str, Param]:
    """Return the parameters of layers in order, with a tied parameter only once, at its first use.

    Raise ValueError if a name occurs with two shapes.
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
    instance("a parameter's name", name, str, "a string")
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


def initial_values(name: str, param: Param, seed: int, start: int, stop: int) -> Array:
    """Return elements [start, stop) of the flattened initial values of a parameter, float32.

    Random draws depend only on (seed, name, position): each block is drawn from its own counter range
    of Philox (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011).
    """
    values = np.zeros(stop - start, np.float32)
    if param.init == "ones":
        values.fill(1)
    elif param.init == "normal":
        key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
        for begin in range(start - start % DRAW_BLOCK, stop, DRAW_BLOCK):
            first, last = max(start, begin), min(stop, begin + DRAW_BLOCK)
            count, counter = last - begin, [0, 0, 0, begin // DRAW_BLOCK]
            generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
            draws = normals(generator, count + count % 2)  # `--bits portable` draws pairs
            values[first - start : last - start] = draws[first - begin : count] * np.float32(param.std)
    return values
