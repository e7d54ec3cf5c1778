"""Update rules of an optimizer: one interface, chosen by name patterns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from zero_mpi.device.types import Array


@dataclass(frozen=True)
class Part:
    """Neighbouring elements that one update takes, flat arrays of one length.

    parameters, gradients   float32, of this rank; gradients are the sums over ranks, without `grad_scale`
    states   name -> float32 array
    decay    (chunks,) float64: weight decay of each of the part's chunks of equal length
    low      takes the parameters rounded to the type of computing; None if layers read `parameters`
    """

    parameters: Array
    gradients: Array
    states: Mapping[str, Array]
    decay: Array
    low: Array | None = None


class Rule(ABC):
    """A rule of update. Make one by a subclass with the two attributes and `update`.

    type     its name, in `optimizer.gguf`
    states   names of its states: float32 arrays as long as the parameters, zeros at first. A file holds
             them in full shape as `optimizer.STATE.PARAMETER`
    """

    type: ClassVar[str]
    states: ClassVar[tuple[str, ...]]

    @abstractmethod
    def update(self, part: Part, lr: float, grad_scale: float, step: int) -> None:
        """Update parameters and states in place. Elements are independent: they may be split in any way.

        `grad_scale` multiplies gradients (clipping, loss scale); `step` counts from 1.
        """


class MatrixRule(Rule):
    """A rule that needs whole matrices: each lies on one rank (`ShardedModule(whole=...)`)."""

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
        """Turn the gradient of one parameter into what `update` takes for it, in place, and update states.

        gradient, states: flat float32, from the parameter's first element on, with zeros behind its last
        up to a multiple of 1024. Called on the owner alone, once a step, before `update`.
        """
