"""A mixture of experts: a router sends each token to a few of many gated feed-forward layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from types import SimpleNamespace
from typing import Any, NamedTuple

from zero_mpi import ops
from zero_mpi.nn.balance import RouterLosses
from zero_mpi.nn.batch import batch_of, turns
from zero_mpi.nn.layer import AddsInForward, Composite, Gradients, Layer, Stack, Tally, Weights
from zero_mpi.nn.linear import OBSERVERS, Linear


def wide(x: Any, w: Any, b: Any = None, plus: Any = None) -> Any:
    """Return y of a linear layer without a bias, in float32 or wider."""
    return ops.linear_wide(x, w, plus)


WIDE = SimpleNamespace(linear=wide)


class Routing(NamedTuple):
    """The experts chosen for T tokens, as `ops.route` returns them; logits (T, N) are float32 or wider."""

    logits: Any
    p: Any
    chosen: Any
    rows: Any
    tokens: Any
    weights: Any
    starts: Any


def grouped(starts: Any) -> Any:
    """Return the operations of a linear layer with stacked matrices (N, O, C), for rows sorted by expert."""
    return SimpleNamespace(
        linear=lambda x, w, b=None, plus=None: ops.grouped_linear(x, w, starts, plus),
        linear_backward_x=lambda dy, w, into=None: ops.grouped_linear_backward_x(dy, w, starts, into),
        linear_backward_w=lambda dy, x, dw: ops.grouped_linear_backward_w(dy, x, dw, starts),
    )


class Experts(Composite, AddsInForward):
    """Layer y (..., C) = sum of p_e down_e(silu(gate_e x) * up_e x) over the `used` experts e of largest p.

    p is the softmax of the router `PREFIX.ffn_gate_inp` (N, C), divided by its sum over the used experts if
    `normalized`. Matrices are stacked: `PREFIX.ffn_gate_exps`, `.ffn_up_exps` (N, F, C), `.ffn_down_exps` (N,
    C, F). A `shared` layer gets every token, and its y is added. A token's rows are added in expert order.
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

    def stacks(self) -> list[Stack]:
        return [Stack(tuple(name for part in (self.gate, self.up, self.down) for name in part.params()))]

    def tallies(self) -> dict[str, Tally]:
        return super().tallies() | self.losses.tallies()

    def route(self, p: Weights, x: Any) -> Routing:
        """Return the chosen experts for x (T, C)."""
        logits = self.router.forward(p, x, via=WIDE)[0]
        return Routing(logits, *ops.route(logits, self.used, self.normalized))

    def forward(self, p: Weights, x: Any, residual: Any = None) -> tuple[Any, Any]:
        flat, kept, of_shared = x.reshape(-1, x.shape[-1]), dict[int | None, tuple[Any, Any]](), None
        routing = self.route(p, flat)
        self.losses.report(batch_of(p), routing.logits, routing.p, routing.chosen, routing.starts)
        for observe in OBSERVERS:
            observe(self.router.weight, flat, None)
        rows = ops.embedding(routing.tokens, flat)
        for members, weights, _ in turns(p):
            part, starts = rows_of(routing.starts, members, len(rows))
            if part.start == part.stop:
                continue
            via = grouped(starts)
            gate, up = (each.forward(weights, rows[part], via=via)[0] for each in (self.gate, self.up))
            kept[members.start] = gate, up
            if OBSERVERS:
                bounds = routing.starts.clip(part.start, part.stop) - part.start
                self._observe(rows[part], gate, up, bounds)
            inner = ops.weighted_swiglu(gate, up, routing.weights[part])
            rows = placed(rows, part, self.down.forward(weights, inner, via=via)[0])
        if self.shared is not None:
            y, of_shared = self.shared.forward_onto(p, x, residual)
        else:
            y = ops.scale(x, 0.0) if residual is None else ops.scale(residual, 1.0)
        ops.embedding_backward(routing.tokens, rows, y.reshape(flat.shape))
        return y, (x, routing, kept, of_shared)

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        x, routing, kept, of_shared = saved
        flat, of_weights = x.reshape(-1, x.shape[-1]), list[tuple[slice, Any]]()
        rows = ops.embedding(routing.tokens, dy.reshape(flat.shape))
        for members, weights, gradients in turns(p, g):
            part, starts = rows_of(routing.starts, members, len(rows))
            if part.start == part.stop:
                continue
            (gate, up), of_rows, via = kept[members.start], routing.weights[part], grouped(starts)
            inner = ops.weighted_swiglu(gate, up, of_rows), None
            dgate, dup, dw = ops.weighted_swiglu_backward(
                self.down.backward(weights, inner, rows[part], gradients, via=via), gate, up, of_rows
            )
            here = ops.embedding(routing.tokens[part], flat), None
            drows = self.gate.backward(weights, here, dgate, gradients, via=via)
            drows = self.up.backward(weights, here, dup, gradients, drows, via=via)
            rows = placed(rows, part, drows)
            of_weights.append((part, dw))
        dx = self._backward_of_choice(p, flat, routing, of_weights, g)
        ops.embedding_backward(routing.tokens, rows, dx)
        dx = dx.reshape(x.shape)
        return dx if self.shared is None else self.shared.backward_onto(p, of_shared, dy, g, dx)

    def _backward_of_choice(
        self, p: Weights, x: Any, routing: Routing, of_weights: list[tuple[slice, Any]], g: Gradients
    ) -> Any:
        """Return the router's contribution to dx (T, C); of_weights: gradients of the rows' weights."""
        (_, dw), *more = of_weights
        if more:
            dw = routing.weights.astype(dw.dtype)
            for part, values in of_weights:
                dw[part] = values
        dlogits = ops.route_backward(
            dw, routing.weights, routing.p, routing.chosen, routing.rows, self.normalized
        )
        self.losses.add_gradient(batch_of(p), dlogits, routing.logits, routing.p)
        return self.router.backward(p, (x, None), dlogits, g)

    def _observe(self, rows: Any, gate: Any, up: Any, starts: Any) -> None:
        """Call the observers with the inputs of some experts' matrices; starts: each expert's first row."""
        for observe in OBSERVERS:
            plain = ops.swiglu(gate, up)  # without weights, as in llama.cpp, which applies them after `down`
            for linear, x_of in (self.gate, rows), (self.up, rows), (self.down, plain):
                observe(linear.weight, x_of, starts)


def placed(rows: Any, part: slice, values: Any) -> Any:
    """Return `rows` with `part` replaced by `values`; if the part is all rows, return `values` itself."""
    if len(values) == len(rows):
        return values
    rows[part] = values
    return rows


@singledispatch
def rows_of(starts: Any, members: slice, count: int) -> tuple[slice, Any]:
    """Return the range of some experts' rows among all `count` sorted rows, and where each expert begins."""
    if members.stop is None:
        return slice(0, count), starts
    begin = int(starts[members.start])
    return slice(begin, int(starts[members.stop])), starts[members.start : members.stop + 1] - begin
