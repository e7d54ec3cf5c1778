"""Multiplication of a branch, an embedding or logits by a number."""

from __future__ import annotations

from typing import Any

from zero_mpi import ops
from zero_mpi.nn.fusions import AddsInForward
from zero_mpi.nn.layer import Gradients, Weights


class Multiply(AddsInForward):
    """y = x * factor."""

    backward_reads_params = False

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def forward(self, p: Weights, x: Any, residual: Any = None) -> tuple[Any, Any]:
        return ops.scale(x, self.factor, residual), None

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        return ops.scale(dy, self.factor)
