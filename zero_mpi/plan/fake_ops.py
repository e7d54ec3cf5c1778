"""The operations on fake arrays: results and temporaries of the compiled ones, and how much work they are.

Each takes from the room what `ops.cpu` takes from `device.arrays.recycled`, in the same order, or on a GPU
what `ops.gpu` takes; what differs is in `workspaces`. Results have the type of their inputs, statistics are
float32. (On the host low types are a reference, whose float32 copies are not counted.)
"""

from __future__ import annotations

import math
from typing import Any

from zero_mpi import ops
from zero_mpi.device.types import Array
from zero_mpi.plan.fake_array import Ghost, Room
from zero_mpi.plan.workspaces import weights_of_head

FLOAT = 4  # bytes of a score


def room_of(x: Array) -> Room:
    """Where the results of operations on x are counted."""
    assert x.room is not None, "a ghost comes from a room"
    room: Room = x.room
    return room


def lines(x: Array) -> int:
    """Rows of x (..., C) as a matrix."""
    return math.prod(x.shape[:-1])


def linear(x: Array, w: Array, b: Array | None = None, plus: Array | None = None) -> Array:
    """As `reference.linear`."""
    room = room_of(x)
    y = room.take((*x.shape[:-1], w.shape[0]), x.dtype)
    room.product(lines(x), *w.shape)
    if plus is not None or b is not None:
        room.passes(y, y)
    if plus is not None:
        room.passes(plus)
    return y


def linear_backward_x(dy: Array, w: Array, into: Array | None = None) -> Array:
    """As `reference.linear_backward_x`."""
    room = room_of(dy)
    room.product(lines(dy), *w.shape)
    return room.take((*dy.shape[:-1], w.shape[1]), dy.dtype) if into is None else into


def linear_backward_w(dy: Array, x: Array, dw: Array) -> None:
    """As `reference.linear_backward_w`."""
    room_of(dy).product(lines(dy), *dw.shape)


def linear_backward_b(dy: Array, db: Array) -> None:
    """As `reference.linear_backward_b`."""
    room_of(dy).passes(dy)
    room_of(dy).kernels.column_sums(room_of(dy), lines(dy), dy.shape[-1])


def embedding(tokens: Array, w: Array) -> Array:
    """As `reference.embedding`."""
    room = room_of(tokens)
    y = room.take((*tokens.shape, w.shape[1]), w.dtype)
    room.passes(y, y)
    return y


def embedding_backward(tokens: Array, dy: Array, dw: Array) -> None:
    """As `reference.embedding_backward`."""
    room_of(tokens).passes(dy, dy, dy)
    room_of(tokens).kernels.sorted_tokens(room_of(tokens), tokens, dy.shape[-1])


def positions(x: Array, w: Array) -> Array:
    """As `reference.positions`."""
    return elementwise(x, 2)


def positions_backward(dy: Array, dw: Array) -> None:
    """As `reference.positions_backward`."""
    room_of(dy).passes(dy)
    room_of(dy).kernels.column_sums(room_of(dy), dy.shape[0], dw.size)


def elementwise(x: Array, reads: int) -> Array:
    """One array of x's shape from `reads` such arrays."""
    room = room_of(x)
    y = room.take(x.shape, x.dtype)
    room.passes(*[y] * (reads + 1))
    return y


def add(x: Array, y: Array) -> Array:
    """As `reference.add`."""
    return elementwise(x, 2)


def gelu(x: Array) -> Array:
    """As `reference.gelu`."""
    return elementwise(x, 1)


def gelu_backward(dy: Array, x: Array) -> Array:
    """As `reference.gelu_backward`."""
    return elementwise(x, 2)


def swiglu(gate: Array, up: Array) -> Array:
    """As `reference.swiglu`."""
    return elementwise(gate, 2)


def swiglu_backward(dy: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    """As `reference.swiglu_backward`."""
    return elementwise(gate, 3), elementwise(gate, 0)


def rms_norm(x: Array, w: Array, eps: float) -> tuple[Array, Array]:
    """As `reference.rms_norm`."""
    return elementwise(x, 1), room_of(x).take((*x.shape[:-1], 1))


def rms_norm_backward(
    dy: Array, x: Array, w: Array, r: Array, dw: Array | None, plus: Array | None = None
) -> Array:
    """As `reference.rms_norm_backward`."""
    dx = elementwise(x, 2 if plus is None else 3)
    room_of(x).kernels.norm_sums(room_of(x), x, int(dw is not None))
    return dx


def layer_norm(x: Array, w: Array, b: Array, eps: float) -> tuple[Array, Array, Array]:
    """As `reference.layer_norm`."""
    y, room = elementwise(x, 1), room_of(x)
    return y, room.take((*x.shape[:-1], 1)), room.take((*x.shape[:-1], 1))


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
    """As `reference.layer_norm_backward`."""
    dx = elementwise(x, 2 if plus is None else 3)
    room_of(x).kernels.norm_sums(room_of(x), x, (dw is not None) + (db is not None))
    return dx


def rope(x: Array, cos: Array, sin: Array, interleaved: bool, out: Array | None = None) -> Array:
    """As `reference.rope`."""
    room = room_of(x)
    y = room.take(x.shape, x.dtype) if out is None else out
    room.passes(y, y)
    return y


def causal_attention(q: Array, k: Array, v: Array, scale: float) -> tuple[Array, Any]:
    """As `reference.causal_attention`; blocks above the diagonal are not computed."""
    room, (batch, length, heads, width) = room_of(q), q.shape
    size = weights_of_head(length, k.shape[1])
    y, kept = room.kernels.attention(room, q, k, v)
    room.product(batch * heads, size, width + v.shape[3])
    # The most, the exponentials, the shares.
    room.moved += 3 * FLOAT * batch * heads * size * room.kernels.moves_scores(q)
    return y, kept


def causal_attention_backward(
    dy: Array, q: Array, k: Array, v: Array, kept: Any, scale: float
) -> tuple[Array, Array, Array]:
    """As `reference.causal_attention_backward`; weights that were not kept are computed again."""
    room, (batch, length, heads, width) = room_of(dy), q.shape
    (dq, dk, dv), again = room.kernels.attention_backward(room, dy, q, k, v, kept)
    size = weights_of_head(length, k.shape[1])
    room.product(batch * heads, size, (3 if again else 2) * width + 2 * v.shape[3])
    room.moved += 4 * FLOAT * batch * heads * size * room.kernels.moves_scores(q)
    return dq, dk, dv


def cross_entropy(logits: Array, targets: Array, scale: float) -> tuple[float, Array]:
    """As `reference.cross_entropy`."""
    room_of(logits).logits = int(logits.nbytes)
    return 0.0, elementwise(logits, 3)


def linear_cross_entropy(
    x: Array,
    w: Array,
    b: Array | None,
    targets: Array,
    scale: float,
    dw: Array | None = None,
    db: Array | None = None,
    need_dx: bool = True,
) -> tuple[float, Array | None]:
    """As `reference.linear_cross_entropy`."""
    room, n = room_of(x), lines(x)
    logits, dx = room.kernels.logits(room, x, w, need_dx)
    if db is not None:
        room.kernels.column_sums(room, len(logits), w.shape[0])
    room.logits = max(room.logits, int(logits.nbytes))
    for wanted in (True, dw is not None, need_dx):
        if wanted:
            room.product(n, *w.shape)
    passes = 4 + (b is not None) + (db is not None)  # the most, the exponentials, the shares, the gradient
    room.moved += passes * logits.itemsize * n * w.shape[0]
    return 0.0, dx


OPERATIONS = (
    add,
    causal_attention,
    causal_attention_backward,
    cross_entropy,
    embedding,
    embedding_backward,
    gelu,
    gelu_backward,
    layer_norm,
    layer_norm_backward,
    linear,
    linear_backward_b,
    linear_backward_w,
    linear_backward_x,
    linear_cross_entropy,
    positions,
    positions_backward,
    rms_norm,
    rms_norm_backward,
    rope,
    swiglu,
    swiglu_backward,
)
for _operation in OPERATIONS:
    getattr(ops, _operation.__name__).register(Ghost, _operation)
