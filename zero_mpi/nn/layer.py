"""Definition of a layer: it names its parameters, has a forward and a backward, and holds no arrays.

Weights are an argument of `forward` and `backward`, so the runtime may free them after forward and
gather them again for backward. Backward *adds* into the gradients it is given: accumulation, tied
weights and flat gradient buffers then need no more code. Parameter names are GGUF's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zero_mpi.arguments import came, instance, number, whole
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
        size = 1
        for length in self.shape:
            size *= length
        return size

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


class Layer:
    """Base of all layers.

    `saved` is any value that backward needs from forward; it must not hold arrays of `p`. A parameter that
    is missing in `g` is frozen: its gradient is not computed.

    A layer that overwrites its x and dy saves memory and a pass. Only a `Chain` takes it, between two layers
    that keep neither the y of their forward nor the dx of their backward.
    """

    overwrites = False
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

    def forward(self, p: Weights, x: Any) -> tuple[Any, Any]:
        """Return (y, saved): the output, and the values that backward needs."""
        raise NotImplementedError

    def saved(self, p: Weights, x: Any) -> Any:
        """Return the values that backward needs, alone: forward without products that only y needs."""
        return self.forward(p, x)[1]

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        """Return dx; add the parameters' gradients into g. x and dy are not changed."""
        raise NotImplementedError


class Composite(Layer):
    """A layer made of others, with the parameters of those layers."""

    def parts(self) -> Sequence[Layer]:
        """Return the layers that it is made of, in the order of their parameters."""
        raise NotImplementedError

    def params(self) -> dict[str, Param]:
        return {name: param for part in self.parts() for name, param in part.params().items()}

    def stacks(self) -> list[Stack]:
        return [stack for part in self.parts() for stack in part.stacks()]

    def tallies(self) -> dict[str, Tally]:
        return {name: tally for part in self.parts() for name, tally in part.tallies().items()}

    def update(self, buffers: MutableMapping[str, Array], sums: Mapping[str, Array]) -> None:
        for part in self.parts():
            part.update(buffers, sums)


def preserving(layer: Layer) -> Layer:
    """Return the layer; raise ValueError if it overwrites its input, which others may need."""
    if getattr(layer, "overwrites", False):
        raise ValueError(
            f"{type(layer).__name__} overwrites its input: expected it in a Chain, between two layers whose "
            "keeps_results is False"
        )
    return layer


@dataclass(frozen=True)
class Stage:
    """One step of a model: a layer, and the scope (name prefix) whose parameters are gathered together."""

    scope: str
    layer: Layer

    def __post_init__(self) -> None:
        preserving(self.layer)


def stage_params(stages: list[Stage]) -> dict[str, Param]:
    """Return all parameters of a model in order; a tied one only at its first place. Raise ValueError."""
    params: dict[str, Param] = {}
    for stage in stages:
        for name, param in stage.layer.params().items():
            check_param(name, param)
            if params.setdefault(name, param).shape != param.shape:
                raise ValueError(f"parameter {name} has the shapes {params[name].shape} and {param.shape}")
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
