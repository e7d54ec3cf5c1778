"""Causal attention on a GPU, by cuDNN if it can be used, otherwise by products and our softmax kernels.

Our own attention gathers the R query heads that share a key/value head as rows (t, r) of one matrix, so that
grouped heads need no special code. The queries are processed in blocks whose scores fit in SCORES bytes.
Forward keeps only the logarithm of each row's sum of exponentials, and backward computes each block again, so
memory grows with T (Dao et al., "FlashAttention", 2022). Gradients of keys and values are summed in float32.

ZERO_MPI_GPU_ATTENTION is auto, own (our kernels), cudnn (an error if cuDNN is missing or has no plan) or
any-order (cuDNN adds gradients in any order, so two runs may differ).
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError
from zero_mpi.ops import reference
from zero_mpi.ops.gpu.gemm import Matrix, batched, kind_of, multiply
from zero_mpi.ops.gpu.launch import ARRAY, BF16, F16, F32, THREADS, Family, at, by_pairs, f4, packed, take
from zero_mpi.ops.gpu.sdpa import ANY_ORDER, Sdpa, sdpa, way
from zero_mpi.ops.registry import implements
from zero_mpi.ops.sizes import PACK, check_kept, gradients_like, score_rows, scores_across

WEIGHTS = Family("attention.cu", "attention_weights", "PPPPLLLLLLLL")
MOVES = ((F32, F32), (BF16, BF16), (F16, F16), (F32, BF16), (F32, F16))
MOVE = by_pairs("attention.cu", "attention_move", "PPLLLLLLLLL", MOVES)
SLOPES = Family("attention.cu", "attention_slopes", "PPLLLLF")
SHARE = 4  # scores that a thread processes at a time


class Sizes(NamedTuple):
    """Sizes in the shapes of q (B, T, H, D), k (B, S, K, D) and v (B, S, K, E); R = H / K."""

    batch: int
    length: int
    total: int
    per_key: int
    kv: int
    width: int
    tall: int

    @property
    def groups(self) -> int:
        """Number of key/value heads in all sequences."""
        return self.batch * self.kv

    @property
    def across(self) -> int:
        """Elements from a row of scores to the next row: a multiple of 8, so that rows are aligned."""
        return scores_across(self.total)


def sizes_of(q: Array, k: Array, v: Array) -> Sizes:
    """Return the sizes; raise ValueError for a type that products do not support."""
    (b, t, h, d), (s, kv, e) = q.shape, v.shape[1:]
    kind_of(q.dtype)
    return Sizes(b, t, s, h // kv, kv, d, e)


# ------------------------------------------------------------------------------------------------- which way


def by_cudnn(q: Array, k: Array, v: Array, begins: Array | None = None) -> Sdpa | None:
    """Return cuDNN if it supports these arrays. Raise UsageError if it is required but cannot be used.

    Our kernels compute packed documents: cuDNN would need a graph for each set of document lengths.
    """
    if way() == "own" or begins is not None:
        return None
    cudnn, reason = sdpa()
    if cudnn is None and way() == "cudnn":
        raise UsageError(f"ZERO_MPI_GPU_ATTENTION=cudnn: cuDNN cannot be used: {reason}")
    return cudnn if cudnn is not None and cudnn.fits(q, k, v) else None


def check_own_allowed(name: str) -> None:
    """Raise UsageError if ZERO_MPI_GPU_ATTENTION requires cuDNN, which has no plan for these shapes."""
    if way() == "cudnn":
        raise UsageError(f"ZERO_MPI_GPU_ATTENTION=cudnn: cuDNN has no plan for the {name} of these shapes")


def slower(kind: Any) -> str:
    """Return a warning if low-precision attention should use cuDNN but cannot; otherwise an empty string."""
    reason = sdpa()[1] if kind in (BF16, F16) and way() != "own" else ""
    return reason and f"attention is several times slower here, without cuDNN: {reason}"


def about() -> str:
    """Return a description of the attention backend, for messages."""
    if way() == "own":
        return "attention by own kernels"
    cudnn, reason = sdpa()
    if cudnn is None:
        return f"attention by own kernels, no cuDNN: {reason}"
    return f"attention by cuDNN {cudnn.version}, gradients in {'any' if way() == ANY_ORDER else 'one'} order"


@implements(reference.causal_attention, ARRAY)
def causal_attention(
    q: Array, k: Array, v: Array, scale: float, begins: Array | None = None
) -> tuple[Array, Any]:
    """Compute `reference.causal_attention`; backward gets (y for cuDNN or None, logarithms, begins)."""
    y = take((*q.shape[:3], v.shape[3]), q.dtype)
    sums = take((q.shape[0], q.shape[2], q.shape[1]), F32)
    if not y.size:
        return y, (None, sums, begins)
    cudnn = by_cudnn(q, k, v, begins)
    if cudnn is not None:
        if cudnn.forward(q, k, v, scale, y, sums):
            return y, (y, sums, None)
        check_own_allowed("attention")
    sizes = sizes_of(q, k, v)
    forward(sizes, Scores(sizes, q.dtype, begins), (q, k, v), scale, y, sums)
    return y, (None, sums, begins)


@implements(reference.causal_attention_backward, ARRAY)
def causal_attention_backward(
    dy: Array, q: Array, k: Array, v: Array, saved: Any, scale: float
) -> tuple[Array, Array, Array]:
    y, sums, begins = saved
    batch, length, heads, _ = q.shape
    check_kept((y, dy.size), (sums, batch * heads * length), (begins, batch * length))
    gradients = gradients_like(q, k, v, take)
    if not dy.size:
        for x in gradients:
            x.fill(0)
        return gradients
    cudnn = by_cudnn(q, k, v) if y is not None else None
    if cudnn is not None:
        if cudnn.backward((q, k, v, y, dy, *gradients), sums, scale):
            return gradients
        check_own_allowed("gradient of attention")
    sizes = sizes_of(q, k, v)
    backward(sizes, Scores(sizes, q.dtype, begins), (q, k, v, dy), sums, scale, gradients)
    return gradients


# --------------------------------------------------------------------------------------------------- own way


def grouped(x: Array, kv: int) -> Array:
    """Return x (B, T, heads, width), or a copy in which the R heads of a group are adjacent."""
    shared, size = x.shape[2] // kv, x.itemsize
    adjacent = shared == 1 or x.strides[2] == x.shape[3] * size
    return x if adjacent and (x.shape[3] == 1 or x.strides[3] == size) else packed(x)


def steps(x: Array, kv: int) -> tuple[int, int, int]:
    """Return the strides, in elements, of sequences, head groups and positions of x (B, T, heads, width)."""
    b, t, h, _ = (stride // x.itemsize for stride in x.strides)
    return b, h * (x.shape[2] // kv), t


def move(source: Array, target: Array, shape: tuple[int, ...], strides: Sequence[int]) -> None:
    """Copy (B, K, T, R width) between arrays with these `strides`; convert to the type of the target."""
    *rows, width = shape
    packs = -(-width * target.itemsize // PACK)
    threads = min(THREADS, -(-packs // 32) * 32)
    MOVE[source.dtype, target.dtype](math.prod(rows), threads, (source, target, *rows[1:], width, *strides))


def gathered(x: Array, kv: int) -> Array:
    """Return a copy (B, K, T R, width) of x (B, T, heads, width): a matrix for each key/value head."""
    x, (b, t, h, d) = grouped(x, kv), x.shape
    shared = h // kv
    copy, wide = take((b, kv, t * shared, d), x.dtype), shared * d
    move(x, copy, (b, kv, t, wide), (*steps(x, kv), kv * t * wide, t * wide, wide))
    return copy


def unpack(copy: Array, x: Array, kv: int) -> None:
    """Write a gathered array to x, in the type of x."""
    b, t, h, d = x.shape
    assert grouped(x, kv) is x, "the heads of a result are adjacent"
    wide = h // kv * d
    move(copy, x, (b, kv, t, wide), (kv * t * wide, t * wide, wide, *steps(x, kv)))


def blocks(sizes: Sizes) -> Iterator[tuple[int, int, int]]:
    """Yield (first, n, m) of blocks of n queries that see the first m keys; the last block comes first."""
    most = score_rows(sizes.groups * sizes.per_key, sizes.total)
    for first in reversed(range(0, sizes.length, most)):
        n = min(most, sizes.length - first)
        yield first, n, sizes.total - sizes.length + first + n


class Scores:
    """Buffers for the float32 scores of a block and for its weights, which have the type of the inputs.

    begins (B, T): the first key that each query sees; None: each query sees all keys up to its own.
    """

    def __init__(self, sizes: Sizes, kind: Any, begins: Array | None) -> None:
        self.sizes, self.kind, self._begins = sizes, kind, None if begins is None else packed(begins)
        most = max(n for _, n, _ in blocks(sizes))
        self.scores = take((sizes.groups * most * sizes.per_key * sizes.across,), F32)
        self.weights = self.scores if kind == F32 else take(self.scores.shape, kind)

    def matrix(self, buffer: Array, n: int, m: int) -> Matrix:
        """Return a block in `buffer` as a batch of matrices (n R, m), one for each key/value head."""
        sizes, rows = self.sizes, n * self.sizes.per_key
        kind, apart = kind_of(buffer.dtype), rows * sizes.across
        return Matrix(buffer.data.ptr, rows, m, sizes.across, kind, sizes.groups, apart)

    def weigh(self, first: int, n: int, m: int, sums: Array, again: bool) -> Matrix:
        """Turn scores into weights; write `sums`, or read them if `again`."""
        places = self.scores, self.weights, sums, at(self._begins)
        numbers = self.sizes.kv, self.sizes.length, first, int(again)
        WEIGHTS[self.kind](*self._grid(n, m), (*places, *self._rows(n, m), *numbers))
        return self.matrix(self.weights, n, m)

    def slope(self, n: int, m: int, d: Array, scale: float) -> Matrix:
        """Turn weights into the gradient of the unscaled scores, given d, the gradient of the weights."""
        SLOPES[self.kind](*self._grid(n, m), (d, self.weights, *self._rows(n, m), f4(scale)))
        return self.matrix(self.weights, n, m)

    def _rows(self, n: int, m: int) -> tuple[int, int, int, int]:
        return m, self.sizes.across, n, self.sizes.per_key

    def _grid(self, n: int, m: int) -> tuple[int, int]:
        """Return (blocks, threads): one block per row, the number of threads a power of two."""
        threads = min(THREADS, max(32, 1 << (-(-m // SHARE) - 1).bit_length()))
        return self.sizes.groups * n * self.sizes.per_key, threads


def forward(sizes: Sizes, work: Scores, inputs: Sequence[Array], scale: float, y: Array, sums: Array) -> None:
    """Fill y (B, T, H, E) and sums (B, H, T) from inputs q, k and v."""
    heads = [gathered(x, sizes.kv) for x in inputs]
    queries, keys, values = (batched(x) for x in heads)
    out = take((sizes.batch, sizes.kv, sizes.length * sizes.per_key, sizes.tall), y.dtype)
    for first, n, m in blocks(sizes):
        rows = first * sizes.per_key, n * sizes.per_key
        multiply(queries.part(*rows), keys.part(0, m), work.matrix(work.scores, n, m), tb=True, scale=scale)
        p = work.weigh(first, n, m, sums, again=False)
        multiply(p, values.part(0, m), batched(out).part(*rows))
    unpack(out, y, sizes.kv)


def backward(
    sizes: Sizes, work: Scores, inputs: Sequence[Array], sums: Array, scale: float, into: tuple[Array, ...]
) -> None:
    """Fill into = (dq, dk, dv) from inputs q, k, v and dy.

    The last block sees all keys, so it writes the gradients to which the other blocks add.
    """
    heads = [gathered(x, sizes.kv) for x in inputs]
    queries, keys, values, dys = (batched(x) for x in heads)
    out = take(heads[0].shape, heads[0].dtype), take(heads[1].shape, F32), take(heads[2].shape, F32)
    dq, dk, dv = (batched(x) for x in out)
    slopes = take(work.scores.shape, F32)
    for first, n, m in blocks(sizes):
        rows, last = (first * sizes.per_key, n * sizes.per_key), m == sizes.total
        q, dy = queries.part(*rows), dys.part(*rows)
        dk_seen, dv_seen = dk.part(0, m), dv.part(0, m)
        multiply(q, keys.part(0, m), work.matrix(work.scores, n, m), tb=True, scale=scale)
        p = work.weigh(first, n, m, sums, again=True)
        multiply(p, dy, dv_seen, ta=True, c=None if last else dv_seen)
        multiply(dy, values.part(0, m), work.matrix(slopes, n, m), tb=True)
        ds = work.slope(n, m, slopes, scale)
        multiply(ds, keys.part(0, m), dq.part(*rows))
        multiply(ds, q, dk_seen, ta=True, c=None if last else dk_seen)
    for copy, x in zip(out, into, strict=True):
        unpack(copy, x, sizes.kv)
