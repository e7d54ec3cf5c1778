"""Update rules of an optimizer: the interface `Rule`, AdamW, and quantization-aware training."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from zero_mpi import ops
from zero_mpi.device.types import Array
from zero_mpi.ops.rounding import round_to

MASTER = "master"  # name of the state of `Rounded`


@dataclass(frozen=True)
class Part:
    """Adjacent elements that are updated together, as flat arrays of the same length.

    parameters, gradients   float32 (fp64: float64); gradients are not yet multiplied by `grad_scale`
    states   name -> array of the same type
    decay    (chunks,) float64: weight decay of each of the part's chunks of equal length
    low      parameters rounded to the compute dtype, or None if layers read `parameters`; AdamW writes it,
             and the optimizer writes it after other rules
    """

    parameters: Array
    gradients: Array
    states: Mapping[str, Array]
    decay: Array
    low: Array | None = None


class Rule(ABC):
    """Base class of update rules. A subclass has two attributes and the method `update`.

    type     name of the rule in `optimizer.gguf`
    states   names of states: arrays like the parameters, initially zero, saved in full
             shape as `optimizer.STATE.PARAMETER`
    """

    type: ClassVar[str]
    states: ClassVar[tuple[str, ...]]

    def begin(self, part: Part) -> None:  # noqa: B027  (most rules need nothing)
        """Prepare states and parameters once, before the first update of a new run."""

    @abstractmethod
    def update(self, part: Part, lr: float, grad_scale: float, step: int) -> None:
        """Update parameters and states in place. Each element must be updated independently of all others.

        `grad_scale` multiplies gradients (clipping, loss scale); `step` counts from 1.
        """


class MatrixRule(Rule):
    """Base class of rules that need each full matrix on one rank (`ShardedModule(whole=...)`)."""

    @abstractmethod
    def direct(
        self,
        name: str,
        shape: tuple[int, ...],
        gradient: Array,
        states: Mapping[str, Array],
        lr: float,
        grad_scale: float,
    ) -> None:
        """Turn the gradient of one parameter in place into the direction that `update` uses; update states.

        gradient, states: flat float32 arrays, padded with zeros to a multiple of 1024 elements. The
        optimizer calls it once per step on the owner, before `update`.
        """


@dataclass(frozen=True)
class AdamW(Rule):
    """AdamW (Loshchilov and Hutter, 2019).

    betas, eps    decay rates of the two moments, and the number added to the square root of the second moment
    """

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    type: ClassVar[str] = "adamw"
    states: ClassVar[tuple[str, ...]] = ("adam.first_moments", "adam.second_moments")

    def update(self, part: Part, lr: float, grad_scale: float, step: int) -> None:
        first, second = (part.states[name] for name in self.states)
        ops.adamw(
            part.parameters,
            part.gradients,
            first,
            second,
            grad_scale=grad_scale,
            lr=lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            eps=self.eps,
            decay=part.decay,
            step=step,
            low=part.low,
        )


@dataclass(frozen=True)
class Rounded(Rule):
    """Rule that updates float32 masters by another rule; parameters are masters rounded to a quantized type.

    Parameters thus have the values of a quantized file, and gradients are computed at these values. Shards
    end at multiples of 1024 elements or of a row, and a row consists of full blocks, so no block is cut.
    """

    rule: Rule
    kind: str

    @property
    def type(self) -> str:  # type: ignore[override]
        return self.rule.type

    @property
    def states(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*self.rule.states, MASTER)

    def begin(self, part: Part) -> None:
        part.states[MASTER][...] = part.parameters
        round_to(self.kind, part.states[MASTER], part.parameters)

    def update(self, part: Part, lr: float, grad_scale: float, step: int) -> None:
        sub_part = replace(part, parameters=part.states[MASTER], low=None)
        self.rule.update(sub_part, lr, grad_scale, step)
        round_to(self.kind, part.states[MASTER], part.parameters)
