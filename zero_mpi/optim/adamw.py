"""AdamW (Loshchilov and Hutter, 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zero_mpi import ops
from zero_mpi.optim.rule import Part, Rule


@dataclass(frozen=True)
class AdamW(Rule):
    """AdamW. betas: decay of the two moments; eps: a number added to the root of the second."""

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
