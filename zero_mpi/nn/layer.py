"""What a layer is: it names its parameters and knows two functions, and it holds no arrays.

Weights are an argument of `forward` and `backward`, so the runtime may free them after the one and
gather them again for the other. Backward *adds* into the gradients it is given: accumulation, tied
weights and flat gradient buffers then need no more code. Parameter names are GGUF's own.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero_mpi.arguments import came, instance, number, whole
from zero_mpi.device.types import Array

Weights = Mapping[str, Array]
Gradients = MutableMapping[str, Array]
INITS = ("normal", "ones", "zeros")


@dataclass(frozen=True)
class Param:
    """A parameter: shape, and how it starts: "normal" with `std`, "ones" or "zeros"."""

    shape: tuple[int, ...]
    init: str = "normal"
    std: float = 0.02

    @property
    def size(self) -> int:
        """The number of its elements."""
        size = 1
        for length in self.shape:
            size *= length
        return size

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices, not to norms and biases."""
        return len(self.shape) >= 2


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
        """The output y, and what backward needs: (y, saved)."""
        raise NotImplementedError

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        """dx; adds the parameters' gradients into g. x and dy stay as they are."""
        raise NotImplementedError


class Composite(Layer):
    """A layer made of others, whose parameters are its own."""

    def parts(self) -> Sequence[Layer]:
        """The layers that it is made of, in the order of their parameters."""
        raise NotImplementedError

    def params(self) -> dict[str, Param]:
        return {name: param for part in self.parts() for name, param in part.params().items()}


@dataclass(frozen=True)
class Stage:
    """One step of a model: a layer, and the scope (name prefix) whose parameters travel together."""

    scope: str
    layer: Layer


def stage_params(stages: list[Stage]) -> dict[str, Param]:
    """All parameters of a model in its order; a tied one once, where it comes first. Raises ValueError."""
    params: dict[str, Param] = {}
    for stage in stages:
        for name, param in stage.layer.params().items():
            check_param(name, param)
            if params.setdefault(name, param).shape != param.shape:
                raise ValueError(f"parameter {name} has the shapes {params[name].shape} and {param.shape}")
    return params


def check_param(name: Any, param: Any) -> None:
    """Raise ValueError for a parameter that cannot be."""
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
