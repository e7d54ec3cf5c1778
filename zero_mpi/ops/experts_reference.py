"""Definitions for mixtures of experts: the choice of experts, and products of rows grouped by expert.

T tokens choose U of N experts each. The R = T U rows are sorted by expert, then by token. No shape depends on
the choices: `starts` (N + 1,) has the first row of each expert, and R.
"""

from collections.abc import Iterator
from itertools import pairwise

from zero_mpi.device.arrays import namespace
from zero_mpi.device.types import Array
from zero_mpi.ops.activations_reference import swiglu, swiglu_backward
from zero_mpi.ops.registry import operation


def groups(starts: Array) -> Iterator[tuple[int, slice]]:
    """Yield (index, slice of its rows) for each expert that has rows."""
    for expert, (start, stop) in enumerate(pairwise(starts.tolist())):
        if stop > start:
            yield expert, slice(start, stop)


@operation("x ... C, w O C real, plus? ... O wide -> ... O wide", widens=False)
def linear_wide(x: Array, w: Array, plus: Array | None = None) -> Array:
    """Return y (..., O) = x (..., C) @ w (O, C) transposed + plus, in float32 or wider."""
    kind = namespace(x).float32 if x.dtype.itemsize < 4 else x.dtype
    y = x.astype(kind).reshape(-1, x.shape[-1]) @ w.astype(kind).T
    y = y.reshape(*x.shape[:-1], w.shape[0])
    return y if plus is None else y + plus


@operation("logits T N, used; 0 < used <= N", widens=False)
def route(logits: Array, used: int, normalized: bool) -> tuple[Array, ...]:
    """Choose `used` experts for each token from a router's logits (T, N).

    Return p (T, N), the softmax; chosen (T, U), the experts with the largest p in descending order, on ties
    the lower index first; rows (R,), the flat index in `chosen` of each sorted row; tokens (R,), each row's
    token; weights (R, 1), each row's p, divided by its token's sum if `normalized`; starts (N + 1,). Shazeer
    et al., "Outrageously Large Neural Networks", 2017.
    """
    xp = namespace(logits)
    p = xp.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    chosen = xp.argsort(-p, axis=-1, kind="stable")[:, :used].astype(xp.int64)
    w = p[xp.arange(len(p))[:, None], chosen]
    if normalized:
        w /= w.sum(axis=-1, keepdims=True)
    flat = chosen.reshape(-1)
    rows = xp.argsort(flat, kind="stable").astype(xp.int64)
    starts = xp.zeros(p.shape[1] + 1, xp.int64)
    starts[1:] = xp.cumsum(xp.bincount(flat, minlength=p.shape[1]))
    return p, chosen, rows, rows // used, w.reshape(-1, 1)[rows], starts


@operation("dw R 1, w R 1 wide, p T N wide, chosen T U int64, rows R int64 -> T N; R == T * U")
def route_backward(dw: Array, w: Array, p: Array, chosen: Array, rows: Array, normalized: bool) -> Array:
    """Return dlogits (T, N) of `route` from dw (R, 1). The choice of experts itself has no gradient."""
    xp = namespace(dw)
    d, share = xp.empty((2, rows.size), p.dtype)
    d[rows], share[rows] = dw[:, 0], w[:, 0]
    d, share = d.reshape(chosen.shape), share.reshape(chosen.shape)
    place = xp.arange(len(p))[:, None], chosen
    if normalized:
        dlogits = xp.zeros_like(p)
        dlogits[place] = share * (d - (share * d).sum(axis=-1, keepdims=True))
    else:
        dlogits = -p * (p[place] * d).sum(axis=-1, keepdims=True)
        dlogits[place] += p[place] * d
    return dlogits


@operation("gate R F, up R F, w R 1 wide -> R F")
def weighted_swiglu(gate: Array, up: Array, w: Array) -> Array:
    """Return w * silu(gate) * up for rows (R, F) with weights w (R, 1)."""
    return w * swiglu(gate, up)


@operation("dy R F, gate R F, up R F, w R 1 wide -> R F, R F, R 1")
def weighted_swiglu_backward(dy: Array, gate: Array, up: Array, w: Array) -> tuple[Array, Array, Array]:
    """Return (dgate, dup, dw) of `weighted_swiglu`."""
    return *swiglu_backward(w * dy, gate, up), (dy * swiglu(gate, up)).sum(axis=-1, keepdims=True)


@operation("x R C, w N O C, starts M int64, plus? R O -> R O; M == N + 1")
def grouped_linear(x: Array, w: Array, starts: Array, plus: Array | None = None) -> Array:
    """Return y (R, O) = plus + the product of each row of x (R, C) and its expert's w (O, C) transposed."""
    y = namespace(x).empty((x.shape[0], w.shape[1]), x.dtype)
    for expert, part in groups(starts):
        y[part] = x[part] @ w[expert].T
    return y if plus is None else y + plus


@operation("dy R O, w N O C, starts M int64, into?+ R C -> R C; M == N + 1")
def grouped_linear_backward_x(dy: Array, w: Array, starts: Array, into: Array | None = None) -> Array:
    """Return dx (R, C) of `grouped_linear`; if `into` is given, add dx to it in place."""
    dx = namespace(dy).zeros((dy.shape[0], w.shape[2]), dy.dtype) if into is None else into
    for expert, part in groups(starts):
        dx[part] += dy[part] @ w[expert]
    return dx


@operation("dy R O, x R C, dw+ N O C real, starts M int64; M == N + 1")
def grouped_linear_backward_w(dy: Array, x: Array, dw: Array, starts: Array) -> None:
    """Add the gradient of w to dw (N, O, C). An expert without rows adds nothing."""
    for expert, part in groups(starts):
        dw[expert] += dy[part].T @ x[part]
