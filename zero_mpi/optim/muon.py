"""Muon: the update of a matrix has the direction of its orthogonalized momentum.

Keller Jordan, "Muon: an optimizer for hidden layers in neural networks", 2024. A few steps of an odd
polynomial (Newton-Schulz) bring all singular values near 1. Every matrix is unsharded, on one rank, so
products have the same shapes and updates are bit-identical for any number of ranks. By default an update is
as large as AdamW's (Liu et al., "Muon is Scalable for LLM Training", 2025), so both rules use the same
learning rate and weight decay.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from zero_mpi import ops
from zero_mpi.device.arrays import Scalar, namespace
from zero_mpi.device.types import Array
from zero_mpi.optim.optimizer import value_of
from zero_mpi.optim.rule import MatrixRule, Part
from zero_mpi.sharding.unit import QUANTUM

# Coefficients (a, b, c) of the polynomial a s + b s^3 + c s^5, one triple per step.
KELLER = ((3.4445, -4.7750, 2.0315),) * 5
JIACHENG = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
SCALES = {  # name -> factor of an update, given the matrix's rows and columns
    "adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "keller": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "spectral": lambda rows, columns: math.sqrt(rows / columns),
}
EPS = 1e-7  # added to the norm that divides a matrix


@dataclass(frozen=True)
class Muon(MatrixRule):
    """Muon rule; the last two dimensions of a parameter are a matrix.

    momentum       decay of the momentum
    nesterov       True for Nesterov momentum
    scale          "adamw", "keller" or "spectral": the size of updates
    coefficients   (a, b, c) of each step: KELLER, JIACHENG or others
    parts          name pattern -> numbers of rows of the matrices that are fused in a parameter
    kind           dtype of the products: float32, or bfloat16
    """

    momentum: float = 0.95
    nesterov: bool = True
    scale: str = "adamw"
    coefficients: tuple[tuple[float, float, float], ...] = KELLER
    parts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    kind: Any = np.float32
    type: ClassVar[str] = "muon"
    states: ClassVar[tuple[str, ...]] = ("muon.momentum",)

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise ValueError(f"Muon: scale: expected one of {', '.join(SCALES)}, got {self.scale!r}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"Muon: momentum: expected a number from 0 to below 1, got {self.momentum}")

    def direct(
        self,
        name: str,
        shape: tuple[int, ...],
        gradient: Array,
        states: Mapping[str, Array],
        lr: float,
        grad_scale: float,
    ) -> None:
        momentum = states[self.states[0]]
        gradient *= np.float32((1 - self.momentum) * grad_scale)
        momentum *= np.float32(self.momentum)
        momentum += gradient
        if self.nesterov:
            gradient += momentum * np.float32(self.momentum)
        else:
            gradient[...] = momentum
        stack = gradient[: math.prod(shape)].reshape(-1, *shape[-2:])
        rows = self.rows_of(name, shape)
        for full in stack:
            for part, end in zip(rows, np.cumsum(rows).tolist(), strict=True):
                matrix = full[end - part : end]
                matrix[...] = self.orthogonal(matrix)
                matrix *= np.float32(lr * SCALES[self.scale](*matrix.shape))

    def rows_of(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of rows of each matrix in a parameter; raise ValueError if the sum is wrong."""
        rows = value_of(self.parts, name, shape[-2:-1])
        if min(rows, default=0) < 1 or sum(rows) != shape[-2]:
            raise ValueError(f"Muon: parts: {name}: expected rows that add up to {shape[-2]}, got {rows}")
        return rows

    def orthogonal(self, matrix: Array) -> Array:
        """Return a matrix with the singular vectors of `matrix` and singular values near 1."""
        tall = matrix.shape[0] > matrix.shape[1]
        x = (matrix.T if tall else matrix).copy()
        x *= (1.0 / (norm(x) + EPS)).astype(np.float32)
        x = x.astype(self.kind, copy=False)
        for a, b, c in self.coefficients:
            square = ops.linear(x, x)
            factor = ops.linear(square, square)
            factor *= x.dtype.type(c)
            factor += square * x.dtype.type(b)
            x = ops.linear_backward_x(factor, x, x * x.dtype.type(a))
        return x.T if tall else x

    def update(self, part: Part, lr: float, grad_scale: float, step: int) -> None:
        chunks = part.parameters.reshape(len(part.decay), -1)
        chunks *= (1.0 - lr * part.decay)[:, None].astype(np.float32)
        chunks -= part.gradients.reshape(chunks.shape)  # `direct` has multiplied by the learning rate


def norm(x: Array) -> Scalar:
    """Return the Euclidean norm of a matrix; its squares are summed in float64 in one fixed order.

    On a GPU the result stays in GPU memory, so that the host does not wait for it.
    """
    flat = x.reshape(-1)
    full = flat.size // QUANTUM * QUANTUM
    sums = [ops.chunk_squares(flat[:full], QUANTUM)] if full else []
    if flat.size > full:
        sums.append(ops.chunk_squares(flat[full:], flat.size - full))
    return namespace(x).sqrt(sum(part.sum() for part in sums))
