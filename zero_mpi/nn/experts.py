"""A mixture of experts: a router sends each token to a few of many gated feed-forward layers.

Each router has auxiliary losses and reports the load of its experts (`RouterLosses`).

`balance_loss` is defined as in transformers (`load_balancing_loss_func`): N sum_e f_e P_e with f_e = C_e / R
and P_e = S_e / R. C_e counts how often expert e was chosen and S_e sums its probabilities, over all routed
layers of a micro-batch together, and R = layers * tokens. If the load is balanced, the loss is U, the number
of experts that a token uses. C is a count, so the derivative with respect to a probability is N C_e / R^2.
`z_loss` is the mean over tokens of log(sum(exp(logits)))^2, summed over layers (Zoph et al., "ST-MoE", 2022).
"""

from collections.abc import Mapping, Sequence
from functools import singledispatch
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from zero_mpi import ops
from zero_mpi.device.arrays import namespace
from zero_mpi.device.types import Array
from zero_mpi.nn.batch import BatchContext, batch_of, turns
from zero_mpi.nn.layer import AddsInForward, Composite, Gradients, Layer, Stack, Tally, Weights
from zero_mpi.nn.linear import OBSERVERS, Linear
from zero_mpi.ops.elementary import logs
from zero_mpi.ops.flat_reference import column_sums

# Products of a linear layer without a bias, with results in float32 or wider.
WIDE = SimpleNamespace(linear=lambda x, w, b=None, plus=None: ops.linear_wide(x, w, plus))

BALANCE, Z, LOAD = "balance_loss", "z_loss", ".expert_load"
ROWS = 1024  # rows of logits that are processed at a time


def balance(sums: Mapping[str, Any]) -> float:
    counts, p = (np.asarray(sums.get(name, 0.0), float) for name in ("routed_counts", "routed_p"))
    return float(counts.size * np.vdot(counts, p) / max(1.0, float(sums.get("routed_rows", 1))) ** 2)


def log_sums(logits: Array, p: Array) -> Array:
    """Return log(sum(exp(logits))) (T,) of each row of logits (T, N), given their softmax p."""
    return logits.max(axis=-1) - logs(p.max(axis=-1)).astype(p.dtype)


class RouterLosses:
    """Losses and load of a router with N experts, in the layer `name`."""

    def __init__(self, name: str, experts: int) -> None:
        self.name, self.experts = name, experts

    def tallies(self) -> dict[str, Tally]:
        """Return the tallies of a routed layer. At scale 0, the default, a loss has no gradient."""
        load = {self.name + LOAD: Tally((self.experts,))}
        return {BALANCE: Tally(scale=0.0, value=balance), Z: Tally(scale=0.0), **load}

    def report(self, batch: BatchContext, logits: Array, p: Array, chosen: Array, starts: Array) -> None:
        """Report a layer's routing, as `ops.route` returns it, for logits (T, N); padding is left out."""
        counts = starts[1:] - starts[:-1]
        if batch.documents is not None:
            mask = batch.documents.counted
            experts = namespace(chosen).arange(self.experts)
            counts = counts - (chosen[~mask].reshape(-1, 1) == experts).sum(axis=0)
            logits, p = logits[mask], p[mask]
        batch.report(self.name, **{self.name + LOAD: counts})
        if batch.factors:
            squares = (log_sums(logits, p) ** 2).sum(dtype=np.float64)
            batch.report(self.name, routed_counts=counts, routed_p=column_sums(p), routed_rows=len(p))
            batch.report(self.name, **{Z: squares / max(1, len(p))})

    def add_gradient(self, batch: BatchContext, dlogits: Array, logits: Array, p: Array) -> None:
        """Add the gradients of both losses to dlogits (T, N) in place, after all layers have reported."""
        if not batch.factors:
            return
        balance_factor, z_factor = (batch.factors.get(name, 0.0) for name in (BALANCE, Z))
        counts, rows = batch.sums["routed_counts"], max(1, batch.sums["routed_rows"])
        slope = (counts * (balance_factor * self.experts / rows**2)).astype(p.dtype)  # dloss / dp, (N,)
        mask = None if batch.documents is None else batch.documents.counted
        tokens = len(p) if mask is None else max(1, int(mask.sum()))
        for start in range(0, len(p), ROWS):
            part = slice(start, start + ROWS)
            mean = column_sums((p[part] * slope).T)
            if z_factor:
                mean = mean - (2 * z_factor / tokens) * log_sums(logits[part], p[part])
            gradient = p[part] * (slope - mean[:, None])
            if mask is not None:
                gradient[~mask[part]] = 0
            dlogits[part] = dlogits[part] + gradient  # dlogits may be in low precision (bf16 or fp16)


class Routing(NamedTuple):
    """The experts chosen for T tokens, as `ops.route` returns them; logits (T, N) are float32 or wider."""

    logits: Any
    p: Any
    experts: Any
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
        layers = [self.router, self.gate, self.up, self.down]
        return layers if self.shared is None else [*layers, self.shared]

    def stacks(self) -> list[Stack]:
        return [Stack(tuple(name for part in (self.gate, self.up, self.down) for name in part.params()))]

    def tallies(self) -> dict[str, Tally]:
        return super().tallies() | self.losses.tallies()

    def route(self, p: Weights, x: Any) -> Routing:
        logits = self.router.forward(p, x, via=WIDE)[0]
        return Routing(logits, *ops.route(logits, self.used, self.normalized))

    def forward(self, p: Weights, x: Any, residual: Any = None) -> tuple[Any, Any]:
        flat, pairs, saved_shared = x.reshape(-1, x.shape[-1]), dict[int | None, tuple[Any, Any]](), None
        routing = self.route(p, flat)
        self.losses.report(batch_of(p), routing.logits, routing.p, routing.experts, routing.starts)
        for observe in OBSERVERS:
            observe(self.router.weight, flat, None)
        rows = ops.embedding(routing.tokens, flat)
        for members, weights, _ in turns(p):
            part, starts = rows_of(routing.starts, members, len(rows))
            if part.start == part.stop:
                continue
            via = grouped(starts)
            gate, up = (linear.forward(weights, rows[part], via=via)[0] for linear in (self.gate, self.up))
            pairs[members.start] = gate, up
            if OBSERVERS:
                bounds = routing.starts.clip(part.start, part.stop) - part.start
                self._observe(rows[part], gate, up, bounds)
            inner = ops.weighted_swiglu(gate, up, routing.weights[part])
            rows = with_part(rows, part, self.down.forward(weights, inner, via=via)[0])
        if self.shared is not None:
            y, saved_shared = self.shared.forward_onto(p, x, residual)
        else:
            y = ops.scale(x, 0.0) if residual is None else ops.scale(residual, 1.0)
        ops.embedding_backward(routing.tokens, rows, y.reshape(flat.shape))
        return y, (x, routing, pairs, saved_shared)

    def backward(self, p: Weights, saved: Any, dy: Any, g: Gradients) -> Any:
        x, routing, pairs, saved_shared = saved
        flat, dweights = x.reshape(-1, x.shape[-1]), list[tuple[slice, Any]]()
        rows = ops.embedding(routing.tokens, dy.reshape(flat.shape))
        for members, weights, gradients in turns(p, g):
            part, starts = rows_of(routing.starts, members, len(rows))
            if part.start == part.stop:
                continue
            (gate, up), row_weights, via = pairs[members.start], routing.weights[part], grouped(starts)
            inner = ops.weighted_swiglu(gate, up, row_weights), None
            dgate, dup, dw = ops.weighted_swiglu_backward(
                self.down.backward(weights, inner, rows[part], gradients, via=via), gate, up, row_weights
            )
            inputs = ops.embedding(routing.tokens[part], flat), None
            drows = self.gate.backward(weights, inputs, dgate, gradients, via=via)
            drows = self.up.backward(weights, inputs, dup, gradients, drows, via=via)
            rows = with_part(rows, part, drows)
            dweights.append((part, dw))
        dx = self._backward_of_router(p, flat, routing, dweights, g)
        ops.embedding_backward(routing.tokens, rows, dx)
        dx = dx.reshape(x.shape)
        return dx if self.shared is None else self.shared.backward_onto(p, saved_shared, dy, g, dx)

    def _backward_of_router(
        self, p: Weights, x: Any, routing: Routing, dweights: list[tuple[slice, Any]], g: Gradients
    ) -> Any:
        """Return the router's contribution to dx (T, C); dweights: gradients of the rows' weights."""
        dw = dweights[0][1]
        if len(dweights) > 1:
            dw = routing.weights.astype(dw.dtype)
            for part, values in dweights:
                dw[part] = values
        dlogits = ops.route_backward(
            dw, routing.weights, routing.p, routing.experts, routing.rows, self.normalized
        )
        self.losses.add_gradient(batch_of(p), dlogits, routing.logits, routing.p)
        return self.router.backward(p, (x, None), dlogits, g)

    def _observe(self, rows: Any, gate: Any, up: Any, starts: Any) -> None:
        """Call the observers with the inputs of some experts' matrices; starts: each expert's first row."""
        for observe in OBSERVERS:
            plain = ops.swiglu(gate, up)  # without weights, as in llama.cpp, which applies them after `down`
            for linear, x in (self.gate, rows), (self.up, rows), (self.down, plain):
                observe(linear.weight, x, starts)


def with_part(rows: Any, part: slice, values: Any) -> Any:
    """Return `rows` with `part` replaced by `values`; if the part is all rows, return `values` itself."""
    if len(values) == len(rows):
        return values
    rows[part] = values
    return rows


@singledispatch
def rows_of(starts: Any, members: slice, count: int) -> tuple[slice, Any]:
    """Return the range of some experts' rows among all `count` sorted rows, and each expert's start in it."""
    if members.stop is None:
        return slice(0, count), starts
    begin = int(starts[members.start])
    return slice(begin, int(starts[members.stop])), starts[members.start : members.stop + 1] - begin
