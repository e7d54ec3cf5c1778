"""Definitions of all operations and their backwards in array code; tests compare faster versions with them.

Axes: N rows (tokens), B sequences, T positions, C model width, O output width, H query heads, K key/value
heads, R = H / K, D width of a head, V vocabulary. Gradients of parameters are *added* to the array passed for
them. No other input is written unless its docstring says so. Results have the inputs' type, losses float64.
"""

from typing import Any

from zero_mpi.arguments import UNCOUNTED
from zero_mpi.device.arrays import namespace
from zero_mpi.device.types import Array
from zero_mpi.ops.activations_reference import *  # noqa: F403
from zero_mpi.ops.experts_reference import *  # noqa: F403
from zero_mpi.ops.flat_reference import *  # noqa: F403
from zero_mpi.ops.flat_reference import column_sums
from zero_mpi.ops.registry import operation
from zero_mpi.ops.sizes import check_kept

LOGITS_BYTES = 64 << 20  # maximum bytes of logits per chunk; each chunk reads a head's weights once
WITH_MEAN = "dy ... C, x ... C, w C, mean ... 1 wide, r ... 1 wide, "
GROUPED = "; S >= T and K > 0 and H % K == 0"  # several heads of q share a head of k and v


def rows(x: Array) -> Array:
    """Return x (..., C) as a matrix (N, C); a view for contiguous x."""
    return x.reshape(-1, x.shape[-1])


# ------------------------------------------------------------------------------------------------ sums


@operation("x ..., y ... -> ...")
def add(x: Array, y: Array) -> Array:
    return x + y


@operation("x ..., plus? ... -> ...")
def scale(x: Array, factor: float, plus: Array | None = None) -> Array:
    """Return y = x * factor + plus, elementwise, for one number `factor`."""
    y = x * factor
    return y if plus is None else y + plus


# ---------------------------------------------------------------------------------------------- linear


@operation("x ... C, w O C, b? O, plus? ... O -> ... O")
def linear(x: Array, w: Array, b: Array | None = None, plus: Array | None = None) -> Array:
    """Return y (..., O) = x (..., C) @ w (O, C) transposed + b (O,) + plus (..., O)."""
    y = (rows(x) @ w.T).reshape(*x.shape[:-1], w.shape[0])
    for addend in (b, plus):
        if addend is not None:
            y += addend
    return y


@operation("dy ... O, w O C, into?+ ... C -> ... C")
def linear_backward_x(dy: Array, w: Array, into: Array | None = None) -> Array:
    """Return dx (..., C) of `linear` from dy (..., O) and w (O, C); add dx to `into` in place if given."""
    dx = (rows(dy) @ w).reshape(*dy.shape[:-1], w.shape[1])
    if into is None:
        return dx
    into += dx
    return into


@operation("dy ... O, x ... C, dw+ O C real")
def linear_backward_w(dy: Array, x: Array, dw: Array) -> None:
    """Add the gradient of w to dw (O, C)."""
    dw += rows(dy).T @ rows(x)


@operation("dy ... O, db+ O real")
def linear_backward_b(dy: Array, db: Array) -> None:
    """Add the gradient of b, the sum over rows, to db (O,)."""
    db += column_sums(rows(dy))


# ------------------------------------------------------------------------------------------- embedding


@operation("tokens ... whole, w V C -> ... C", widens=False)
def embedding(tokens: Array, w: Array) -> Array:
    """Return y (..., C): row w[token] of w (V, C) for each of the tokens (...), integers below V."""
    return w[tokens]


@operation("tokens ... whole, dy ... C, dw+ V C real")
def embedding_backward(tokens: Array, dy: Array, dw: Array) -> None:
    """Add each row of dy (..., C) to the row of dw (V, C) that its token selects.

    A stable sort brings the rows of each token together, and its order is the order of the sum, so the result
    does not depend on how a machine schedules additions.
    """
    xp = namespace(dy)
    flat = tokens.reshape(-1)
    order = xp.argsort(flat, kind="stable")
    ids, starts = xp.unique(flat[order], return_index=True)
    dw[ids] += xp.add.reduceat(rows(dy)[order], starts, axis=0)


@operation("x B T C, w T C -> B T C")
def positions(x: Array, w: Array) -> Array:
    """Return y (B, T, C) = x + w (T, C)."""
    return x + w


@operation("dy B T C, dw+ T C real")
def positions_backward(dy: Array, dw: Array) -> None:
    """Add the gradient of w, the sum over sequences, to dw (T, C)."""
    dw += dy.sum(axis=0)


# ----------------------------------------------------------------------------------------------- norms


@operation("x ... C, w C -> ... C, ... 1 wide")
def rms_norm(x: Array, w: Array, eps: float) -> tuple[Array, Array]:
    """Return y = x / sqrt(mean(x^2) + eps) * w over the last axis, and the reciprocal root (..., 1).

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    xp = namespace(x)
    r = 1.0 / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * r * w, r


@operation("dy ... C, x ... C, w C, r ... 1 wide, dw?+ C real, plus? ... C -> ... C")
def rms_norm_backward(
    dy: Array, x: Array, w: Array, r: Array, dw: Array | None, plus: Array | None = None
) -> Array:
    """Return dx of `rms_norm`, + plus; add the gradient of w to dw (C,) unless dw is None."""
    n = x * r
    if dw is not None:
        dw += column_sums(rows(dy * n))
    d = dy * w
    dx = r * (d - n * (d * n).mean(axis=-1, keepdims=True))
    return dx if plus is None else plus + dx


@operation("x ... C, w C, b C -> ... C, ... 1 wide, ... 1 wide")
def layer_norm(x: Array, w: Array, b: Array, eps: float) -> tuple[Array, Array, Array]:
    """Return y = (x - mean) / sqrt(var + eps) * w + b over the last axis, the mean and the reciprocal root.

    Ba, Kiros and Hinton, "Layer Normalization", 2016.
    """
    xp = namespace(x)
    mean = x.mean(axis=-1, keepdims=True)
    centred = x - mean
    r = 1.0 / xp.sqrt(xp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return centred * r * w + b, mean, r


@operation(WITH_MEAN + "dw?+ C real, db?+ C real, plus? ... C -> ... C")
def layer_norm_backward(
    dy: Array,
    x: Array,
    w: Array,
    mean: Array,
    r: Array,
    dw: Array | None,
    db: Array | None,
    plus: Array | None = None,
) -> Array:
    """Return dx of `layer_norm`, + plus; add the gradients of w and b to dw and db (C,) unless None."""
    n = (x - mean) * r
    if dw is not None:
        dw += column_sums(rows(dy * n))
    if db is not None:
        db += column_sums(rows(dy))
    d = dy * w
    dx = r * (d - d.mean(axis=-1, keepdims=True) - n * (d * n).mean(axis=-1, keepdims=True))
    return dx if plus is None else plus + dx


# -------------------------------------------------------------------------------------- rotary position


@operation("x B T H D, cos T E wide, sin T E wide, out?+ B T H D -> B T H D; 2 * E <= D")
def rope(x: Array, cos: Array, sin: Array, interleaved: bool, out: Array | None = None) -> Array:
    """Rotate pairs of x (B, T, H, D) by angles with the cosines and sines cos, sin (T, E), E <= D/2.

    If `interleaved`, pair j is (x[2j], x[2j+1]), llama.cpp's NORM order; otherwise (x[j], x[j + E]), its
    NEOX order. Elements after the E pairs do not change. Backward is the same operation with -sin. The result
    is written to `out` if it is given; `out` may be x itself.
    Su et al., "RoFormer", 2021.
    """
    y = namespace(x).empty_like(x) if out is None else out
    half = cos.shape[-1]
    first, second = slice(half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = x[..., first], x[..., second]
    c, s = cos[:, None, :], sin[:, None, :]
    y[..., first], y[..., second] = a * c - b * s, b * c + a * s
    if y is not x:
        y[..., 2 * half :] = x[..., 2 * half :]
    return y


# ------------------------------------------------------------------------------------------- attention


def grouped(x: Array, kv_heads: int) -> Array:
    """Return x (B, T, H, D) as a view (B, K, R, T, D): K groups of R heads that share a key/value head."""
    b, t, h, d = x.shape
    return x.reshape(b, t, kv_heads, h // kv_heads, d).transpose(0, 2, 3, 1, 4)


@operation("q B T H D, k B S K D, v B S K E, begins? B T int64 -> B T H E, kept" + GROUPED)
def causal_attention(q: Array, k: Array, v: Array, scale: float, begins: Any = None) -> tuple[Array, Any]:
    """Compute softmax attention in which each position sees itself and earlier positions.

    q (B, T, H, D), k (B, S, K, D), v (B, S, K, E) with S >= T: the queries are the last T of S positions.
    begins (B, T): the first of the S positions that each query sees; it never decreases along a row.
    Return y (B, T, H, E) and an array for backward, here the weights (B, K, R, T, S). Query head h uses
    key/value head h // (H / K) (Ainslie et al., "GQA", 2023).
    """
    xp = namespace(q)
    (b, t, h, _), (s, kv, e) = q.shape, v.shape[1:]
    p = grouped(q, kv) @ grouped(k, kv).swapaxes(-1, -2)
    p *= scale
    p += xp.triu(xp.full((t, s), -xp.inf, p.dtype), s - t + 1)
    if begins is not None:
        p[...] = xp.where(xp.arange(s) < begins[:, None, None, :, None], -xp.inf, p)
    p -= p.max(axis=-1, keepdims=True)
    xp.exp(p, out=p)
    p /= p.sum(axis=-1, keepdims=True)
    y = xp.empty((b, t, h, e), q.dtype)
    xp.matmul(p, grouped(v, kv), out=grouped(y, kv))
    return y, p


@operation("dy B T H E, q B T H D, k B S K D, v B S K E -> B T H D, B S K D, B S K E" + GROUPED)
def causal_attention_backward(
    dy: Array, q: Array, k: Array, v: Array, p: Any, scale: float
) -> tuple[Array, Array, Array]:
    """Return (dq, dk, dv) of `causal_attention` from dy (B, T, H, E) and the second result of the forward."""
    xp, kv, (b, t, h, _) = namespace(q), k.shape[2], q.shape
    check_kept((p, b * t * h * k.shape[1]))
    dy_g = grouped(dy, kv)
    dv = (p.swapaxes(-1, -2) @ dy_g).sum(axis=2)
    ds = dy_g @ grouped(v, kv).swapaxes(-1, -2)
    ds -= (ds * p).sum(axis=-1, keepdims=True)
    ds *= p
    ds *= scale
    dq = xp.empty_like(q)
    xp.matmul(ds, grouped(k, kv), out=grouped(dq, kv))
    dk = (ds.swapaxes(-1, -2) @ grouped(q, kv)).sum(axis=2)
    contiguous = xp.ascontiguousarray
    return dq, contiguous(dk.transpose(0, 2, 1, 3)), contiguous(dv.transpose(0, 2, 1, 3))


# ------------------------------------------------------------------------------------------------ loss


@operation("logits ... V, targets ... whole -> loss, ... V")
def cross_entropy(logits: Array, targets: Array, scale: float) -> tuple[Any, Array]:
    """Return the loss and its gradient with respect to the logits (..., V), for integer targets (...).

    loss = scale * sum over rows of -log softmax(logits)[target], a float64 scalar; dlogits has the same
    factor. A row with target UNCOUNTED adds nothing to the loss or the gradient. If scale is 1 / (number of
    targets in the step), the losses of its micro-batches add up to the mean.
    """
    xp = namespace(logits)
    z = rows(logits)
    counts = (ids := targets.reshape(-1)) != UNCOUNTED
    index = (xp.arange(z.shape[0]), xp.where(counts, ids, 0))
    shifted = z - z.max(axis=-1, keepdims=True)
    picked = shifted[index].astype(xp.float64)
    xp.exp(shifted, out=shifted)
    total = shifted.sum(axis=-1, keepdims=True)
    loss = xp.where(counts, xp.log(total[:, 0].astype(xp.float64)) - picked, 0.0).sum() * scale
    shifted *= scale / total
    shifted[index] -= scale
    shifted[~counts] = 0
    return loss, shifted.reshape(logits.shape)


def chunk_rows(n: int, vocabulary: int) -> int:
    """Return how many of n rows of logits to compute at a time, in equal chunks of at most LOGITS_BYTES."""
    chunks = -(-n * vocabulary * 4 // LOGITS_BYTES)
    return max(1, -(-n // max(1, chunks)))


@operation("x ... C, w V C, b? V, targets ... whole, dw?+ V C real, db?+ V real -> loss, ... C")
def linear_cross_entropy(
    x: Array,
    w: Array,
    b: Array | None,
    targets: Array,
    scale: float,
    dw: Array | None = None,
    db: Array | None = None,
    need_dx: bool = True,
) -> tuple[Any, Array | None]:
    """Compute `cross_entropy` of the logits x (..., C) @ w (V, C) transposed + b (V,), and its backward.

    Return (loss, dx), where dx is None unless `need_dx`. Add the gradients of w and b to dw and db, if given.
    Only one chunk of logits exists at a time, whatever the number of rows.
    """
    flat, ids = rows(x), targets.reshape(-1)
    dx = namespace(x).empty_like(flat) if need_dx else None
    step = chunk_rows(len(flat), len(w))
    total = 0.0
    for start in range(0, len(flat), step):
        part = slice(start, start + step)
        loss, dz = cross_entropy(linear(flat[part], w, b), ids[part], scale)
        total = total + loss
        if dw is not None:
            linear_backward_w(dz, flat[part], dw)
        if db is not None:
            linear_backward_b(dz, db)
        if dx is not None:
            dx[part] = linear_backward_x(dz, w)
    return total, None if dx is None else dx.reshape(x.shape)
