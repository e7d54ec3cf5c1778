"""What a layer is: it names its parameters and knows two functions, and it holds no arrays.

Weights are an argument of `forward` and `backward`, so the runtime may free them after the one and
gather them again for the other. Backward *adds* into the gradients it is given: accumulation, tied
weights and flat gradient buffers then need no more code. Parameter names are GGUF's own.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from zero_mpi import ops
from zero_mpi.arrays import Array, Scalar

Weights = Mapping[str, Array]
Gradients = MutableMapping[str, Array]


@dataclass(frozen=True)
class Param:
    """A parameter: shape, and how it starts: "normal" with `std`, "ones" or "zeros"."""

    shape: tuple[int, ...]
    init: str = "normal"
    std: float = 0.02

    @property
    def size(self) -> int:
        """Number of elements."""
        size = 1
        for length in self.shape:
            size *= length
        return size

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices, not to norms and biases."""
        return len(self.shape) >= 2


@dataclass
class Cache:
    """What generation keeps between calls: how many positions are done, and keys and values per layer."""

    position: int = 0
    entries: dict[int, Any] = field(default_factory=dict)


class Layer:
    """Base of all layers.

    `saved` is whatever backward needs of forward and must not hold anything of `p`. A parameter that is
    missing in `g` is frozen: its gradient is not computed.
    """

    backward_reads_params = True  # False lets a sharded unit stay away during this layer's backward

    def params(self) -> dict[str, Param]:
        """Name -> Param, in the order in which they lie in a file."""
        return {}

    def forward(self, p: Weights, x: Any) -> tuple[Any, Any]:
        """(y, saved)."""
        raise NotImplementedError

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        """dx; adds the parameters' gradients into g. x and dy stay as they are."""
        raise NotImplementedError

    def forward_onto(self, p: Weights, x: Any, base: Any) -> tuple[Any, Any]:
        """(base + y, saved). A layer that can add where it writes y overrides it."""
        y, saved = self.forward(p, x)
        return ops.add(base, y), saved

    def backward_onto(self, p: Weights, saved: Any, dy: Any, g: Gradients, base: Any) -> Any:
        """base + dx. A layer that can add where it writes dx overrides it."""
        return ops.add(base, self.backward(p, saved, dy, g))

    def loss(self, p: Weights, x: Any, targets: Any, scale: float, g: Gradients) -> tuple[Scalar, Any]:
        """(loss, dx): forward, the cross-entropy of y as logits, and backward, in one.

        The last layer of a model overrides it where it can do with less than all logits at once. The loss is
        `scale` times the sum over targets of -log softmax.
        """
        y, saved = self.forward(p, x)
        loss, dy = ops.cross_entropy(y, targets, scale)
        return loss, self.backward(p, saved, dy, g)

    def evaluate(self, p: Weights, x: Any, targets: Any, scale: float) -> Scalar:
        """The loss alone."""
        return ops.cross_entropy(self.forward(p, x)[0], targets, scale)[0]

    def infer(self, p: Weights, x: Any, cache: Cache) -> Any:
        """y for the positions that follow those in `cache`; layers that mix positions override it."""
        return self.forward(p, x)[0]


@dataclass(frozen=True)
class Stage:
    """One step of a model: a layer, and the scope (name prefix) whose parameters travel together."""

    scope: str
    layer: Layer


def stage_params(stages: list[Stage]) -> dict[str, Param]:
    """All parameters of a model in its order; a tied one once, where it comes first."""
    params: dict[str, Param] = {}
    for stage in stages:
        for name, param in stage.layer.params().items():
            if params.setdefault(name, param).shape != param.shape:
                raise ValueError(f"parameter {name} has the shapes {params[name].shape} and {param.shape}")
    return params
