"""Quantization-aware training: after each update parameters have the values of a quantized file."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zero_mpi.ops.rounding import round_to
from zero_mpi.optim.rule import Part, Rule

MASTER = "master"


@dataclass(frozen=True)
class Rounded(Rule):
    """Rule that updates float32 masters by another rule; parameters are the masters rounded to a type.

    Gradients are taken at the rounded parameters. Shards end at multiples of 1024 elements or of a row, and
    rows fill blocks, so no block is cut.
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
        """Copy the initial parameters to the masters, then round the parameters."""
        part.states[MASTER][...] = part.parameters
        self._round(part)

    def update(self, part: Part, lr: float, grad_scale: float, step: int) -> None:
        """Update the masters, then round them into the parameters."""
        taken = replace(part, parameters=part.states[MASTER], low=None)
        self.rule.update(taken, lr, grad_scale, step)
        self._round(part)

    def _round(self, part: Part) -> None:
        round_to(self.kind, part.states[MASTER], part.parameters)
        if part.low is not None:
            part.low[...] = part.parameters
