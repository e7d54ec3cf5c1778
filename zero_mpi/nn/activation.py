"""Layers: multiplication by a number, GELU, and the gated projections SwiGLU and GeGLU."""

from collections.abc import Sequence
from typing import Any

from zero_mpi import ops
from zero_mpi.nn.layer import AddsInForward, Composite, Gradients, Layer, Weights
from zero_mpi.nn.linear import Linear, Rows, rows_of


class Multiply(AddsInForward):
    """Layer y = x * factor."""

    backward_reads_params = False

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def forward(self, p: Weights, x: Any, residual: Any = None) -> tuple[Any, Any]:
        return ops.scale(x, self.factor, residual), None

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        return ops.scale(dy, self.factor)


class GELU(Layer):
    """Layer y = GELU(x), elementwise, in the tanh approximation."""

    backward_reads_params = False

    def forward(self, p: Weights, x: Any) -> tuple[Any, Any]:
        return ops.gelu(x), x

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        return ops.gelu_backward(dy, saved)


class SwiGLU(Composite):
    """Layer silu(gate(x)) * up(x), with `PREFIX.ffn_gate` and `.ffn_up` (F, C): (..., C) -> (..., F).

    `suffix` is appended to both names.
    """

    join, split = staticmethod(ops.swiglu), staticmethod(ops.swiglu_backward)

    def __init__(
        self, prefix: str, inputs: int, outputs: int, *, bias: bool = False, suffix: str = ""
    ) -> None:
        names = (f"{prefix}.ffn_{name}{suffix}" for name in ("gate", "up"))
        self.linears = [Linear(name, inputs, outputs, bias=bias) for name in names]
        self.gate: Linear | Rows
        self.up: Linear | Rows
        self.gate, self.up = self.linears

    def parts(self) -> Sequence[Layer]:
        return self.linears

    def forward(self, p: Weights, x: Any) -> tuple[Any, Any]:
        (gate, saved_gate), (up, saved_up) = self.gate.forward(p, x), self.up.forward(p, x)
        return self.join(gate, up), (gate, up, saved_gate, saved_up)

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        gate, up, saved_gate, saved_up = saved
        dgate, dup = self.split(dy, gate, up)
        return self.up.backward(p, saved_up, dup, g, self.gate.backward(p, saved_gate, dgate, g))


class JointSwiGLU(SwiGLU):
    """SwiGLU with one matrix `PREFIX.ffn_up` (2 F, C), whose first F rows are the gate projection."""

    def __init__(self, prefix: str, inputs: int, outputs: int, *, bias: bool = False) -> None:
        sizes = (outputs, outputs)
        self.linears = [Linear(f"{prefix}.ffn_up", inputs, 2 * outputs, bias=bias, fused=sizes)]
        self.gate, self.up = rows_of(self.linears[0], sizes)


class GeGLU(SwiGLU):
    """Layer gelu(gate(x)) * up(x), with the parameter names of SwiGLU."""

    join, split = staticmethod(ops.geglu), staticmethod(ops.geglu_backward)
