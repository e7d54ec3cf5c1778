"""A mixture of experts: a router gives each token to a few of many gated feed-forwards."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from zero_mpi import ops
from zero_mpi.nn.balance import RouterLosses
from zero_mpi.nn.batch import batch_of
from zero_mpi.nn.fusions import AddsInForward, backward_onto, forward_onto
from zero_mpi.nn.layer import Composite, Gradients, Layer, Tally, Weights
from zero_mpi.nn.linear import ALL, OBSERVERS, Linear


def wide(x: Any, w: Any, b: Any = None, plus: Any = None) -> Any:
    """Return y of a linear layer without a bias, in float32 or wider."""
    return ops.linear_wide(x, w, plus)


WIDE = SimpleNamespace(linear=wide)


class Routing(NamedTuple):
    """The choice of experts for T tokens, as `ops.route` returns it; logits (T, N) are float32 or wider."""

    logits: Any
    p: Any
    chosen: Any
    rows: Any
    tokens: Any
    weights: Any
    starts: Any


def grouped(starts: Any) -> Any:
    """Return the operations of linear layers on rows sorted by expert, with stacked matrices (N, O, C)."""
    return SimpleNamespace(
        linear=lambda x, w, b=None, plus=None: ops.grouped_linear(x, w, starts, plus),
        linear_backward_x=lambda dy, w, into=None: ops.grouped_linear_backward_x(dy, w, starts, into),
        linear_backward_w=lambda dy, x, dw: ops.grouped_linear_backward_w(dy, x, dw, starts),
    )


class Experts(Composite, AddsInForward):
    """y (..., C) = sum of p_e down_e(silu(gate_e x) * up_e x) over the `used` experts e of largest p.

    p is the softmax of the router `PREFIX.ffn_gate_inp` (N, C), over its sum of the used if `normalized`.
    Matrices are stacked: `PREFIX.ffn_gate_exps`, `.ffn_up_exps` (N, F, C), `.ffn_down_exps` (N, C, F). A
    `shared` layer sees each token, and its y is added. Rows of a token are added in the order of experts.
    """

    def __init__(
        self,
        prefix: str,
        width: int,
        hidden: int,
        count: int,
        used: int,
        *,
        normalized: bool,
        std: float = 0.02,
        shared: Layer | None = None,
    ) -> None:
        self.used, self.normalized, self.shared = used, normalized, shared
        self.losses = RouterLosses(prefix, count)
        self.router = Linear(f"{prefix}.ffn_gate_inp", width, count)
        self.gate, self.up = (
            Linear(f"{prefix}.ffn_{name}_exps", width, hidden, stack=count) for name in ("gate", "up")
        )
        self.down = Linear(f"{prefix}.ffn_down_exps", hidden, width, stack=count, std=std)

    def parts(self) -> Sequence[Layer]:
        own = [self.router, self.gate, self.up, self.down]
        return own if self.shared is None else [*own, self.shared]

    def tallies(self) -> dict[str, Tally]:
        return super().tallies() | self.losses.tallies()

    def route(self, p: Weights, x: Any) -> Routing:
        """Return the choice of experts for x (T, C)."""
        logits = self.router.rows(p, self.router.saved(p, x, WIDE), ALL, via=WIDE)
        return Routing(logits, *ops.route(logits, self.used, self.normalized))

    def forward(self, p: Weights, x: Any, residual: Any = None) -> tuple[Any, Any]:
        flat, kept = x.reshape(-1, x.shape[-1]), None
        routing = self.route(p, flat)
        self.losses.report(batch_of(p), routing.logits, routing.p, routing.chosen, routing.starts)
        via, rows = grouped(routing.starts), ops.embedding(routing.tokens, flat)
        gate, up = (each.rows(p, each.saved(p, rows, via), ALL, via=via) for each in (self.gate, self.up))
        for observe in OBSERVERS:
            plain = ops.swiglu(gate, up)  # as llama.cpp has it, which weights the rows behind `down`
            for linear, x_of in (self.router, flat), (self.gate, rows), (self.up, rows), (self.down, plain):
                observe(linear.weight, x_of, None if linear is self.router else routing.starts)
        rows = self.down.saved(p, ops.weighted_swiglu(gate, up, routing.weights), via)
        rows = self.down.rows(p, rows, ALL, via=via)
        if self.shared is not None:
            y, kept = forward_onto(self.shared, p, x, residual)
        else:
            y = ops.scale(x, 0.0) if residual is None else ops.scale(residual, 1.0)
        ops.embedding_backward(routing.tokens, rows, y.reshape(flat.shape))
        return y, (x, routing, gate, up, kept)

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        x, routing, gate, up, kept = saved
        flat, via = x.reshape(-1, x.shape[-1]), grouped(routing.starts)
        tokens, weights = routing.tokens, routing.weights
        down = (ops.weighted_swiglu(gate, up, weights), None), ops.embedding(tokens, dy.reshape(flat.shape))
        dgate, dup, dw = ops.weighted_swiglu_backward(
            self.down.backward_of_rows(p, *down, g, ALL, via=via), gate, up, weights
        )
        rows = ops.embedding(tokens, flat), None
        drows = self.gate.backward_of_rows(p, rows, dgate, g, ALL, via=via)
        drows = self.up.backward_of_rows(p, rows, dup, g, ALL, drows, via)
        dlogits = ops.route_backward(dw, weights, routing.p, routing.chosen, routing.rows, self.normalized)
        self.losses.add_gradient(batch_of(p), dlogits, routing.logits, routing.p)
        dx = self.router.backward(p, (flat, None), dlogits, g)
        ops.embedding_backward(tokens, drows, dx)
        dx = dx.reshape(x.shape)
        return dx if self.shared is None else backward_onto(self.shared, p, kept, dy, g, dx)
