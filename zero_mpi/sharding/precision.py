"""Precisions: types of computation and communication, and the scaling of losses.

Slices of the parameters, their moments and summed gradients are float32 ("master weights", Micikevicius et
al., "Mixed Precision Training", 2018), or float64 in FP64, which is for checks and small models on CPUs. In
low precision (bf16 or fp16), a rounded copy of each slice is gathered and used for computation. Gradients may
be sent in low precision too; they are converted to float32 before they are added.
"""

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError

FLOAT32, BFLOAT16, FLOAT16 = (np.dtype(kind) for kind in (np.float32, ml_dtypes.bfloat16, np.float16))
FLOAT64 = np.dtype(np.float64)


@dataclass(frozen=True)
class Precision:
    """Types of a run. compute: type of gathered parameters and activations; reduce: type of sent gradients.

    scales_loss     whether losses are multiplied by a factor, so that small gradients do not vanish
    """

    name: str
    compute: Any
    reduce: Any
    scales_loss: bool = False

    @property
    def master(self) -> Any:
        """Type of updated slices, their optimizer states and summed gradients."""
        return FLOAT64 if self.compute == FLOAT64 else FLOAT32

    @property
    def is_low(self) -> bool:
        """True if a rank keeps its slices in two types, float32 and the compute type."""
        return bool(self.compute != self.master)


FP32 = Precision("fp32", FLOAT32, FLOAT32)
BF16 = Precision("bf16", BFLOAT16, BFLOAT16)
FP16 = Precision("fp16", FLOAT16, FLOAT16, scales_loss=True)
FP64 = Precision("fp64", FLOAT64, FLOAT64)
PRECISIONS = {precision.name: precision for precision in (FP32, BF16, FP16, FP64)}


def precision_named(name: str, reduce: str | None = None) -> Precision:
    """Return the precision of a name, with gradients reduced in the type `reduce` if it is given.

    Raise UsageError for unknown names, and for a type that the precision does not allow.
    """
    if name not in PRECISIONS:
        raise UsageError(f"precision {name!r} is not known; expected one of {', '.join(PRECISIONS)}")
    precision = PRECISIONS[name]
    if reduce in (None, name):
        return precision
    if reduce != FP32.name or precision is FP64:
        names = name if precision in (FP32, FP64) else f"{name} or fp32"
        raise UsageError(f"--reduce-dtype {reduce}: with --precision {name} expected {names}")
    return Precision(precision.name, precision.compute, FLOAT32, precision.scales_loss)


def floats(elements: int, kind: Any) -> int:
    """Return how many float32 elements a buffer needs to hold `elements` elements of the type `kind`."""
    return int(-(-elements * np.dtype(kind).itemsize // FLOAT32.itemsize))


def as_kind(buffer: Any, elements: int, kind: Any) -> Any:
    """Return the first `elements` elements of a flat float32 buffer, viewed as type `kind`."""
    return buffer[: floats(elements, kind)].view(kind)[:elements]


FIRST_EXPONENT, MAX_EXPONENT = 16, 24
GROWTH_STEPS = 2000  # steps with a finite norm before the scale grows


@dataclass
class LossScale:
    """Factor of the loss in float16, whose small gradients would otherwise vanish: 1 unless `dynamic`.

    The factor is a power of two, so multiplying and dividing by it are exact. A step whose gradient norm is
    not finite is skipped and halves the factor; GROWTH_STEPS other steps in a row double it. All ranks
    have the same norm, so they agree without communication.
    """

    dynamic: bool = False
    exponent: int = FIRST_EXPONENT
    good_steps: int = 0

    @property
    def factor(self) -> float:
        return math.ldexp(1.0, self.exponent * self.dynamic)

    @property
    def stored_exponent(self) -> int | None:
        """Exponent that a checkpoint stores; None if the scale is not dynamic."""
        return self.exponent if self.dynamic else None

    def times(self, dy: Array) -> Array:
        """Return a gradient times the factor in float16, whose range it may exceed."""
        with np.errstate(over="ignore", invalid="ignore"):
            return (dy.astype(np.float32) * np.float32(self.factor)).astype(FLOAT16)

    def update(self, finite: bool) -> None:
        """Adapt the factor after a step; `finite`: whether the gradient norm of the step was finite."""
        if not self.dynamic:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.exponent = max(0, self.exponent - 1)
        elif self.good_steps == GROWTH_STEPS:
            self.exponent, self.good_steps = min(MAX_EXPONENT, self.exponent + 1), 0
