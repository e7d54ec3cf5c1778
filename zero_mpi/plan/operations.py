"""The operations on ghosts: the results and temporaries of the compiled ones, and what their work amounts to.

Each takes from the room what `ops.cpu` takes from `arrays.recycled`, in the same order. The sizes of
attention's blocks are those of `ops.cpu.attention`, which is not imported because that compiles kernels; a
test compares.
"""

from __future__ import annotations

import math
from typing import Any

from zero_mpi import ops
from zero_mpi.arrays import Array, side_by_side
from zero_mpi.ops.reference import chunk_rows
from zero_mpi.plan.ghost import Ghost, Room

BLOCK, KEPT_WEIGHTS = 64, 64 << 10  # of ops.cpu.attention


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
    y = room.take((*x.shape[:-1], w.shape[0]))
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
    return room.take((*dy.shape[:-1], w.shape[1])) if into is None else into


def linear_backward_w(dy: Array, x: Array, dw: Array) -> None:
    """As `reference.linear_backward_w`."""
    room_of(dy).product(lines(dy), *dw.shape)


def linear_backward_b(dy: Array, db: Array) -> None:
    """As `reference.linear_backward_b`."""
    room_of(dy).passes(dy)


def embedding(tokens: Array, w: Array) -> Array:
    """As `reference.embedding`."""
    room = room_of(tokens)
    y = room.take((*tokens.shape, w.shape[1]))
    room.passes(y, y)
    return y


def embedding_backward(tokens: Array, dy: Array, dw: Array) -> None:
    """As `reference.embedding_backward`."""
    room_of(tokens).passes(dy, dy, dy)


def positions(x: Array, w: Array) -> Array:
    """As `reference.positions`."""
    return elementwise(x, 2)


def positions_backward(dy: Array, dw: Array) -> None:
    """As `reference.positions_backward`."""
    room_of(dy).passes(dy)


def elementwise(x: Array, reads: int) -> Array:
    """One array of x's shape from `reads` such arrays."""
    room = room_of(x)
    y = room.take(x.shape)
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
    return elementwise(x, 2 if plus is None else 3)


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
    return elementwise(x, 2 if plus is None else 3)


def rope(x: Array, cos: Array, sin: Array, interleaved: bool, out: Array | None = None) -> Array:
    """As `reference.rope`."""
    room = room_of(x)
    y = room.take(x.shape) if out is None else out
    room.passes(y, y)
    return y


def weights_of_head(length: int, total: int) -> int:
    """Elements of a head's weights, by blocks that end at the diagonal: T queries of S positions."""
    starts = range(0, length, BLOCK)
    return sum(min(BLOCK, length - r) * (total - length + min(r + BLOCK, length)) for r in starts)


def causal_attention(q: Array, k: Array, v: Array, scale: float) -> tuple[Array, Any]:
    """As `reference.causal_attention`; blocks above the diagonal are not computed."""
    room, (batch, length, heads, width) = room_of(q), q.shape
    size = weights_of_head(length, k.shape[1])
    keep = size <= KEPT_WEIGHTS
    y = room.take((batch, length, heads, v.shape[3]))
    p = room.take((batch * heads * size if keep else BLOCK * k.shape[1],))
    sums = room.take((batch * heads * length,))
    room.product(batch * heads, size, width + v.shape[3])
    room.moved += 3 * p.itemsize * batch * heads * size  # the most, the exponentials, the shares
    return y, (p if keep else None, sums)


def causal_attention_backward(
    dy: Array, q: Array, k: Array, v: Array, kept: Any, scale: float
) -> tuple[Array, Array, Array]:
    """As `reference.causal_attention_backward`; weights that were not kept are computed again."""
    room, (batch, length, heads, width) = room_of(dy), q.shape
    weights, _ = kept
    d = room.take((BLOCK * k.shape[1],))
    again = room.take((BLOCK * k.shape[1],)) if weights is None else None
    gradients = gradients_like(room, q, k, v)
    size = weights_of_head(length, k.shape[1])
    room.product(batch * heads, size, (2 if again is None else 3) * width + 2 * v.shape[3])
    room.moved += 4 * d.itemsize * batch * heads * size
    return gradients


def gradients_like(room: Room, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Room for dq, dk and dv: columns of one array if q, k and v are."""
    joint = side_by_side((q, k, v))
    if joint is None:
        return room.take(q.shape), room.take(k.shape), room.take(v.shape)
    whole = room.take((*q.shape[:2], joint.shape[-1]))
    first = q.shape[2] * q.shape[3]
    second = first + k.shape[2] * k.shape[3]
    dq, dk, dv = whole[..., :first], whole[..., first:second], whole[..., second:]
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)


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
    logits = room.take((chunk_rows(n, w.shape[0]), w.shape[0]))
    dx = room.take(x.shape) if need_dx else None
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
