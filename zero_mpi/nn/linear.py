"""A linear layer without an activation."""

from __future__ import annotations

from typing import Any

from zero_mpi import ops
from zero_mpi.device.arrays import Scalar
from zero_mpi.nn.fusions import AddsInForward
from zero_mpi.nn.layer import Gradients, Param, Weights
from zero_mpi.nn.low_rank import LowRank


class Linear(AddsInForward):
    """y (..., O) = x (..., C) W^T + b, with W = `NAME.weight` (O, C) and b = `NAME.bias` (O,).

    With an adapter (`low_rank`) its product is added; as a head a layer has none.
    """

    def __init__(
        self, name: str, inputs: int, outputs: int, *, bias: bool = False, std: float = 0.02
    ) -> None:
        self.weight, self.bias = f"{name}.weight", f"{name}.bias" if bias else None
        self._params = {self.weight: Param((outputs, inputs), std=std)}
        if self.bias:
            self._params[self.bias] = Param((outputs,), "zeros")
        self._adapter: LowRank | None = None

    def adapt(self, rank: int, scale: float) -> None:
        """Add a product of low rank, which may be trained while the matrix is frozen."""
        self._adapter = LowRank(self.weight, self._params[self.weight].shape, rank, scale)

    def params(self) -> dict[str, Param]:
        return self._params if self._adapter is None else self._params | self._adapter.params()

    def forward(self, p: Weights, x: Any, residual: Any = None) -> tuple[Any, Any]:
        y = ops.linear(x, p[self.weight], self._bias(p), residual)
        return (y if self._adapter is None else self._adapter.add_to(y, p, x)), x

    def _bias(self, p: Weights) -> Any:
        return p[self.bias] if self.bias else None

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients, into: Any = None) -> Any:
        """dx; added to `into`, which is then the result, where several layers share an input."""
        if self.weight in g:
            ops.linear_backward_w(dy, saved, g[self.weight])
        if self.bias and self.bias in g:
            ops.linear_backward_b(dy, g[self.bias])
        dx = ops.linear_backward_x(dy, p[self.weight], into)
        return dx if self._adapter is None else self._adapter.backward(p, saved, dy, g, dx)

    def loss(self, p: Weights, x: Any, targets: Any, scale: float, g: Gradients) -> tuple[Scalar, Any]:
        """As `fusions.Head.loss`: logits in pieces."""
        dw, db = g.get(self.weight), g.get(self.bias) if self.bias else None
        loss, dx = ops.linear_cross_entropy(x, p[self.weight], self._bias(p), targets, scale, dw, db)
        return loss, dx

    def evaluate(self, p: Weights, x: Any, targets: Any, scale: float) -> Scalar:
        """As `fusions.Head.evaluate`."""
        weight, bias = p[self.weight], self._bias(p)
        return ops.linear_cross_entropy(x, weight, bias, targets, scale, need_dx=False)[0]
