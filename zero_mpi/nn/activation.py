"""GELU, and the gated pair of projections of SwiGLU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zero_mpi import ops
from zero_mpi.nn.layer import Composite, Gradients, Layer, Weights
from zero_mpi.nn.linear import Linear


class GELU(Layer):
    """The tanh form of GELU, elementwise."""

    backward_reads_params = False

    def forward(self, p: Weights, x: Any) -> tuple[Any, Any]:
        return ops.gelu(x), x

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        return ops.gelu_backward(dy, saved)


class SwiGLU(Composite):
    """silu(gate(x)) * up(x), with `PREFIX.ffn_gate` and `PREFIX.ffn_up` (F, C): (..., C) -> (..., F)."""

    def __init__(self, prefix: str, inputs: int, outputs: int, *, bias: bool = False) -> None:
        self.gate = Linear(f"{prefix}.ffn_gate", inputs, outputs, bias=bias)
        self.up = Linear(f"{prefix}.ffn_up", inputs, outputs, bias=bias)

    def parts(self) -> Sequence[Layer]:
        return self.gate, self.up

    def forward(self, p: Weights, x: Any) -> tuple[Any, Any]:
        gate, _ = self.gate.forward(p, x)
        up, _ = self.up.forward(p, x)
        return ops.swiglu(gate, up), (x, gate, up)

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        x, gate, up = saved
        dgate, dup = ops.swiglu_backward(dy, gate, up)
        return self.up.backward(p, x, dup, g, self.gate.backward(p, x, dgate, g))
