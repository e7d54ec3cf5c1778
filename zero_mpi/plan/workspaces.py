"""Temporary memory of operations, on the CPU and on a GPU.

The methods of each class allocate the same blocks as `ops.cpu` or `ops.gpu`, in the same order, and release
them in the same way. Sizes come from `ops.sizes`, because the planner can import neither package.
"""

import os
from typing import Any

import numpy as np

from zero_mpi.device.types import Array
from zero_mpi.ops import sizes
from zero_mpi.ops.reference import chunk_rows
from zero_mpi.plan.fake_ops import FakeMemory

Gradients = tuple[Array, Array, Array]


class Compiled(FakeMemory):
    """Counter of the memory of the CPU's compiled operations."""

    workspace = 0  # bytes of scratch memory of the matmul library
    skips_unseen = True  # attention skips keys that no row of a block sees

    def attention(self, q: Array, k: Array, v: Array, begins: Array | None) -> tuple[Array, tuple[Any, ...]]:
        """Return y and the arrays kept for backward. `begins` has the first key that each row sees."""
        batch, length, heads, _ = q.shape
        tile = low_tile(q, k)
        block = sizes.LOW_BLOCK if tile else sizes.BLOCK
        size = sizes.head_weights(length, k.shape[1], block)
        keep = size <= sizes.KEPT_WEIGHTS
        scores, extra = (tile, 0) if tile else sizes.attention_tile(q, k, v, keep)[2:]
        y = self.take((batch, length, heads, v.shape[3]), q.dtype)
        p = self.take((batch * heads * size if keep else scores,), q.dtype)
        sums = self.take((batch, length, heads, 1 if tile else 2))
        self.take((scores + extra,))
        return y, (p if keep else None, sums, y)

    def attention_backward(
        self, dy: Array, q: Array, k: Array, v: Array, saved: Any
    ) -> tuple[Gradients, bool]:
        """Return (dq, dk, dv), and True if backward computes the attention weights again."""
        recompute, tile = saved[0] is None, low_tile(q, k)
        scores, extra = (tile, 0) if tile else sizes.attention_tile(q, k, v, not recompute)[2:]
        buffers = [self.take((scores + extra,))]
        buffers += [self.take((scores,), q.dtype) for _ in range(recompute + bool(tile))]
        gradients = sizes.gradients_like(q, k, v, self.take)
        early_keys = 0 if tile else sizes.early_keys(q.shape[1], k.shape[1])
        buffers += [self.take((len(x), early_keys, *x.shape[2:])) for x in (k, v)]
        if tile and (q.shape[1] > sizes.LOW_BLOCK or q.shape[2] > k.shape[2]):
            sequences, heads = sizes.tile_heads(q.shape[0], k.shape[2], q.shape[1], k.shape[1])
            for x in (k, v):
                length = sequences * heads * x.shape[1] * x.shape[3]
                buffers += [self.take((length,)), self.take((length,), x.dtype)]
        del buffers
        return gradients, recompute

    def moves_scores(self, q: Array, begins: Array | None) -> bool:
        return True

    def logits_and_dx(self, x: Array, w: Array, need_dx: bool) -> tuple[Array, Array | None]:
        rows = x.size // x.shape[-1]
        logits = self.take((chunk_rows(rows, w.shape[0]), w.shape[0]))
        return logits, self.take(x.shape, x.dtype) if need_dx else None

    def norm_sums(self, x: Array, count: int) -> None:
        """Allocate memory for the gradients of a norm's `count` vectors."""

    def column_sums(self, rows: int, width: int) -> None:
        """Allocate memory for a sum over rows."""

    def sorted_tokens(self, tokens: Array, width: int) -> None:
        """Allocate memory for the gradient of an embedding."""


class OnGPU(Compiled):
    """Counter of a GPU's memory. cuDNN or our kernels compute attention (`by_cudnn`)."""

    workspace = sizes.WORKSPACE
    skips_unseen = False

    def attention(self, q: Array, k: Array, v: Array, begins: Array | None) -> tuple[Array, tuple[Any, ...]]:
        y = self.take((*q.shape[:3], v.shape[3]), q.dtype)
        sums = self.take((q.shape[0], q.shape[2], q.shape[1]))
        if by_cudnn(q, begins):
            return y, (y, sums)
        heads = [self.take((x.size,), x.dtype) for x in (q, k, v)]
        scores = [self.take((y.size,), y.dtype), *self.scores(q, k)]
        del heads, scores
        return y, (None, sums)

    def attention_backward(
        self, dy: Array, q: Array, k: Array, v: Array, saved: Any
    ) -> tuple[Gradients, bool]:
        gradients = sizes.gradients_like(q, k, v, self.take)
        if saved[0] is None:
            heads = [self.take((x.size,), x.dtype) for x in (q, k, v, dy)]
            sums = [self.take((q.size,), q.dtype), self.take((k.size,)), self.take((v.size,))]
            scores = self.scores(q, k)
            slopes = self.take(scores[0].shape)
            del heads, sums, scores, slopes
        else:
            self.take((sizes.cudnn_slopes(q.shape, k.shape[2]),), np.uint8)
        return gradients, True

    def scores(self, q: Array, k: Array) -> list[Array]:
        """Allocate the float32 scores of a block, and in low precision its weights; return both."""
        (batch, length, heads, _), total = q.shape, k.shape[1]
        rows = min(length, sizes.score_rows(batch * heads, total))
        size = batch * heads * rows * sizes.scores_across(total)
        return [self.take((size,)), *([self.take((size,), q.dtype)] if q.itemsize == 2 else [])]

    def moves_scores(self, q: Array, begins: Array | None) -> bool:
        return not by_cudnn(q, begins)

    def logits_and_dx(self, x: Array, w: Array, need_dx: bool) -> tuple[Array, Array | None]:
        rows, width = x.size // x.shape[-1], sizes.logit_width(w.shape[0])
        dx = self.take(x.shape, x.dtype) if need_dx else None
        logits = self.take((sizes.logit_rows(rows, width * x.itemsize), width), x.dtype)
        full = w if width == len(w) else self.take((width, *w.shape[1:]), w.dtype)
        self.take((len(logits),), np.float64)
        del full
        return logits, dx

    def norm_sums(self, x: Array, count: int) -> None:
        width = x.shape[-1]
        lanes = sizes.norm_lanes(width, sizes.PACK // x.itemsize, sizes.HELD)
        lines = min(sizes.NORM_LINES, sizes.norm_blocks(x.size // width, lanes))
        partial = [self.take((lines, width)) for _ in range(count)]
        del partial

    def column_sums(self, rows: int, width: int) -> None:
        self.take((sizes.column_lines(rows), width))

    def sorted_tokens(self, tokens: Array, width: int) -> None:
        keys = self.take((tokens.size,), np.int64)
        self.take((2 * sizes.embedding_runs(tokens.size), width))
        del keys


def low_tile(q: Array, k: Array) -> int:
    """Return the number of scores that a CPU computes at a time in bfloat16; 0 in float32."""
    return sizes.low_tile(q.shape[0], k.shape[2], q.shape[1], k.shape[1]) if q.itemsize == 2 else 0


def by_cudnn(q: Array, begins: Array | None) -> bool:
    """Return True if cuDNN computes attention: in low precision, without `begins`, unless switched off."""
    return q.itemsize == 2 and begins is None and os.environ.get("ZERO_MPI_GPU_ATTENTION") != "own"
