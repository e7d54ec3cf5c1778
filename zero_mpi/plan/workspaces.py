"""What operations take beside their results: the compiled ones of the CPU, and those of a GPU.

Each method takes from the room what `ops.cpu` or `ops.gpu` takes from its pool, in the same order, and lets
go of it in the same way. Sizes are those of `ops.sizes`,
for neither package can be imported where a plan is made.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from zero_mpi.device.arrays import side_by_side
from zero_mpi.device.types import Array
from zero_mpi.ops.reference import chunk_rows
from zero_mpi.ops.sizes import (
    BLOCK,
    COLUMN_LINES,
    COLUMN_ROWS,
    EVEN,
    HELD,
    KEPT_WEIGHTS,
    LINE,
    LOGITS_BYTES,
    NORM_LINES,
    PACK,
    RUN,
    SCORES,
    SLOPES,
    THREADS,
    WORKSPACE,
)
from zero_mpi.plan.fake_array import Room


def weights_of_head(length: int, total: int) -> int:
    """Elements of a head's weights, by blocks that end at the diagonal: T queries of S positions."""
    starts = range(0, length, BLOCK)
    return sum(min(BLOCK, length - r) * (total - length + min(r + BLOCK, length)) for r in starts)


def gradients_like(room: Room, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Room for dq, dk and dv: columns of one array if q, k and v are."""
    joint = side_by_side((q, k, v))
    if joint is None:
        return room.take(q.shape, q.dtype), room.take(k.shape, k.dtype), room.take(v.shape, v.dtype)
    whole = room.take((*q.shape[:2], joint.shape[-1]), joint.dtype)
    first = q.shape[2] * q.shape[3]
    second = first + k.shape[2] * k.shape[3]
    dq, dk, dv = whole[..., :first], whole[..., first:second], whole[..., second:]
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)


class Compiled:
    """The CPU's."""

    workspace = 0  # bytes

    def attention(self, room: Room, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        """y, and what backward takes."""
        batch, length, heads, _ = q.shape
        size = weights_of_head(length, k.shape[1])
        keep = size <= KEPT_WEIGHTS
        y = room.take((batch, length, heads, v.shape[3]), q.dtype)
        p = room.take((batch * heads * size if keep else BLOCK * k.shape[1],))
        sums = room.take((batch * heads * length,))
        return y, (p if keep else None, sums)

    def attention_backward(
        self, room: Room, dy: Array, q: Array, k: Array, v: Array, kept: Any
    ) -> tuple[tuple[Array, Array, Array], bool]:
        """dq, dk and dv; whether the weights are computed again."""
        again = kept[0] is None
        rooms = [room.take((BLOCK * k.shape[1],)) for _ in range(1 + again)]
        gradients = gradients_like(room, q, k, v)
        del rooms
        return gradients, again

    def moves_scores(self, q: Array) -> bool:
        """Whether attention's scores go through memory."""
        return True

    def logits(self, room: Room, x: Array, w: Array, need_dx: bool) -> tuple[Array, Array | None]:
        """A chunk of logits, and dx."""
        rows = x.size // x.shape[-1]
        logits = room.take((chunk_rows(rows, w.shape[0]), w.shape[0]), x.dtype)
        return logits, room.take(x.shape, x.dtype) if need_dx else None

    def norm_sums(self, room: Room, x: Array, count: int) -> None:
        """For the gradients of a norm's `count` vectors."""

    def column_sums(self, room: Room, rows: int, width: int) -> None:
        """For a sum over rows."""

    def sorted_tokens(self, room: Room, tokens: Array, width: int) -> None:
        """For the gradient of an embedding."""


class OnGPU(Compiled):
    """A GPU's. Attention in a low type is taken to be cuDNN's unless ZERO_MPI_GPU_ATTENTION is own."""

    workspace = WORKSPACE

    def attention(self, room: Room, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        y = room.take((*q.shape[:3], v.shape[3]), q.dtype)
        sums = room.take((q.shape[0], q.shape[2], q.shape[1]))
        if by_cudnn(q):
            return y, (y, sums)
        heads = [room.take((x.size,), x.dtype) for x in (q, k, v)]
        scores = [room.take((y.size,), y.dtype), *scores_of(room, q, k)]
        del heads, scores
        return y, (None, sums)

    def attention_backward(
        self, room: Room, dy: Array, q: Array, k: Array, v: Array, kept: Any
    ) -> tuple[tuple[Array, Array, Array], bool]:
        gradients = gradients_like(room, q, k, v)
        if kept[0] is None:
            heads = [room.take((x.size,), x.dtype) for x in (q, k, v, dy)]
            sums = [room.take((q.size,), q.dtype), room.take((k.size,)), room.take((v.size,))]
            scores = scores_of(room, q, k)
            slopes = room.take(scores[0].shape)
            del heads, sums, scores, slopes
        else:
            room.take((cudnn_room(q, k),), np.uint8)
        return gradients, True

    def moves_scores(self, q: Array) -> bool:
        return not by_cudnn(q)

    def logits(self, room: Room, x: Array, w: Array, need_dx: bool) -> tuple[Array, Array | None]:
        rows = x.size // x.shape[-1]
        dx = room.take(x.shape, x.dtype) if need_dx else None
        width = -(-w.shape[0] // LINE) * LINE
        chunks = max(1, -(-rows * width * x.itemsize // LOGITS_BYTES))
        logits = room.take((max(1, -(-rows // chunks)), width), x.dtype)
        room.take((len(logits),), np.float64)
        return logits, dx

    def norm_sums(self, room: Room, x: Array, count: int) -> None:
        width, pack = x.shape[-1], PACK // x.itemsize
        packs = -(-width // pack)
        lanes = min(THREADS, 1 << ((packs if packs <= 32 else max(32, -(-packs // HELD))) - 1).bit_length())
        lines = min(NORM_LINES, -(-(x.size // width) // (THREADS // lanes)))
        partial = [room.take((lines, width)) for _ in range(count)]
        del partial

    def column_sums(self, room: Room, rows: int, width: int) -> None:
        room.take((min(COLUMN_LINES, -(-rows // COLUMN_ROWS)), width))

    def sorted_tokens(self, room: Room, tokens: Array, width: int) -> None:
        keys = room.take((tokens.size,), np.int64)
        room.take((2 * -(-tokens.size // RUN), width))
        del keys


def by_cudnn(q: Array) -> bool:
    """Whether attention is not by own kernels."""
    return q.itemsize == 2 and os.environ.get("ZERO_MPI_GPU_ATTENTION") != "own"


def cudnn_room(q: Array, k: Array) -> int:
    """Bytes that cuDNN's backward takes: in 16 bits each score of blocks of 64 by 128, or a float32 dq."""
    (batch, length, heads, _), total = q.shape, k.shape[1]
    slopes = 2 * batch * heads * (-(-length // 64) * 64) * (-(-total // 128) * 128)
    return int(slopes if slopes <= SLOPES else 4 * q.size)


def scores_of(room: Room, q: Array, k: Array) -> list[Array]:
    """A block's scores, float32, and in a low type its weights."""
    (batch, length, heads, _), total = q.shape, k.shape[1]
    across = -(-total // 8) * 8
    most = max(1, SCORES // (4 * batch * heads * across))
    most = min(length, most // EVEN * EVEN if most > EVEN else most)
    size = batch * heads * most * across
    return [room.take((size,)), *([room.take((size,), q.dtype)] if q.itemsize == 2 else [])]
