"""The factor of the loss in float16, whose small gradients would otherwise vanish.

It is a power of two, so that multiplying and dividing by it are exact. A step whose gradient norm is not
finite halves it and is left out; after many good steps in a row it is doubled. All ranks see the same norm,
so they agree without communication (Micikevicius et al., "Mixed Precision Training", 2018).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from zero_mpi.device.types import Array

FIRST_EXPONENT, MAX_EXPONENT = 16, 24  # exponents
GROWTH_STEPS = 2000  # good steps before it grows


@dataclass
class LossScale:
    """Exponent of the factor, and the number of good steps since it last changed.

    A scale that is not `dynamic` is 1 forever.
    """

    dynamic: bool = False
    exponent: int = 0
    good_steps: int = 0

    @classmethod
    def start(cls, dynamic: bool) -> LossScale:
        """Return the loss scale at the beginning of training."""
        return cls(dynamic, FIRST_EXPONENT if dynamic else 0)

    @property
    def factor(self) -> float:
        """The factor of losses."""
        return math.ldexp(1.0, self.exponent)

    @property
    def recorded(self) -> int | None:
        """The exponent as a checkpoint has it: None if it is not dynamic."""
        return self.exponent if self.dynamic else None

    def times(self, dy: Array) -> Array:
        """Return a gradient times the factor, which itself may be beyond the gradient's type."""
        with np.errstate(over="ignore", invalid="ignore"):
            return (dy.astype(np.float32) * np.float32(self.factor)).astype(dy.dtype)

    def update(self, finite: bool) -> None:
        """Adapt the factor to whether a step's gradient norm was finite."""
        if not self.dynamic:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.exponent = max(0, self.exponent - 1)
        elif self.good_steps == GROWTH_STEPS:
            self.exponent, self.good_steps = min(MAX_EXPONENT, self.exponent + 1), 0
