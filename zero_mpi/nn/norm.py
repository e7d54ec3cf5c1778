"""RMSNorm and LayerNorm over the last axis."""

from typing import Any

from zero_mpi import ops
from zero_mpi.nn.layer import AddsInBackward, Gradients, Param, Weights


class RMSNorm(AddsInBackward):
    """Layer y = x / rms(x) * w, with w = `NAME.weight` (C,)."""

    def __init__(self, name: str, width: int, eps: float) -> None:
        self.weight, self.width, self.eps = f"{name}.weight", width, eps

    def params(self) -> dict[str, Param]:
        return {self.weight: Param((self.width,), "ones")}

    def forward(self, p: Weights, x: Any) -> tuple[Any, Any]:
        y, r = ops.rms_norm(x, p[self.weight], self.eps)
        return y, (x, r)

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients, residual: Any = None) -> Any:
        x, r = saved
        return ops.rms_norm_backward(dy, x, p[self.weight], r, g.get(self.weight), residual)


class LayerNorm(AddsInBackward):
    """Layer y = (x - mean) / deviation * w + b, with w = `NAME.weight` and b = `NAME.bias` (C,)."""

    def __init__(self, name: str, width: int, eps: float) -> None:
        self.weight, self.bias, self.width, self.eps = f"{name}.weight", f"{name}.bias", width, eps

    def params(self) -> dict[str, Param]:
        return {self.weight: Param((self.width,), "ones"), self.bias: Param((self.width,), "zeros")}

    def forward(self, p: Weights, x: Any) -> tuple[Any, Any]:
        y, mean, r = ops.layer_norm(x, p[self.weight], p[self.bias], self.eps)
        return y, (x, mean, r)

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients, residual: Any = None) -> Any:
        x, mean, r = saved
        dw, db = g.get(self.weight), g.get(self.bias)
        return ops.layer_norm_backward(dy, x, p[self.weight], mean, r, dw, db, residual)
