"""Operations on fake arrays; they count the memory and the work of the real operations but compute nothing.

From the pool of recycled memory, each operation allocates the same blocks as `ops.cpu` or `ops.gpu`, in the
same order; `workspaces` has the differences between the two. An operation that is not defined here
allocates only the results in its signature. (Float32 copies on the host, for float16 or without a bfloat16
matmul library, are not counted.)
"""

from __future__ import annotations

import ctypes
import inspect
import math
import mmap
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np

from zero_mpi import device, ops
from zero_mpi.device import Host
from zero_mpi.device.arrays import RECYCLED_FROM, size_class
from zero_mpi.device.types import Array
from zero_mpi.nn.adapters import merged, split_tokens
from zero_mpi.nn.experts import rows_of
from zero_mpi.ops import signatures
from zero_mpi.ops.packed_matrix import PackedStack
from zero_mpi.ops.registry import OPERATIONS
from zero_mpi.ops.sizes import head_weights, unseen_weights

NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux: address space without memory; not in `mmap` of Python 3.11
LEAST_ARENA = 1 << 30  # minimum bytes of address space for fake arrays


class FakeArray(np.ndarray[Any, Any]):
    """Array without data; `memory` counts the arrays that are made from it."""

    memory: FakeMemory | None

    def __array_finalize__(self, source: Any) -> None:
        self.memory = getattr(source, "memory", None)

    def fill(self, value: Any) -> None:
        if self.memory is not None:
            self.memory.passes(self)

    def __setitem__(self, place: Any, values: Any) -> None:
        """Write nothing."""

    def __iadd__(self, other: Any) -> FakeArray:  # type: ignore[misc]
        if self.memory is not None:
            self.memory.passes(self, self)
        return self

    __imul__ = __iadd__


class FakeMemory:
    """Counter of the memory and the work of fake arrays, with subclasses in `plan.workspaces`.

    recycled: bytes of recycled blocks; small: peak bytes of arrays too small to be recycled
    logits: bytes of the largest chunk of logits, which is one of the recycled blocks
    flop: floating-point operations of products; moved_bytes: bytes that all other operations read and write
    """

    def __init__(self) -> None:
        self.recycled = self.small = self.logits = 0
        self.flop = self.moved_bytes = 0.0
        self._small_now = 0
        self._free: Counter[int] = Counter()  # blocks by size class
        self._arena: Any = b""

    def take(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
        """Return a fake array whose memory is counted as `arrays.recycled` would allocate it."""
        fake = self.outside(shape, dtype)
        block = size_class(fake.nbytes) if fake.nbytes >= RECYCLED_FROM else 0
        if not block:
            self._small_now += fake.nbytes
            self.small = max(self.small, self._small_now)
        elif self._free[block]:
            self._free[block] -= 1
        else:
            self.recycled += block
        # Each view references the owner of its addresses.
        weakref.finalize(fake.base, self._give, block, fake.nbytes).atexit = False
        return fake

    def _give(self, block: int, nbytes: int) -> None:
        """Return a block to the pool, after the last view of its fake array is deleted."""
        if block:
            self._free[block] += 1
        else:
            self._small_now -= nbytes

    def outside(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
        """Return a fake array whose memory is not counted; raise MemoryError if addresses run out."""
        nbytes = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
        if nbytes > len(self._arena):  # all fake arrays may have the same addresses
            size = max(LEAST_ARENA, 1 << nbytes.bit_length())
            try:
                self._arena = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
            except OSError as error:
                raise MemoryError(f"{size} bytes of address space: {error.strerror}") from error
        fake = FakeArray(shape, dtype, (ctypes.c_char * nbytes).from_buffer(self._arena))
        fake.memory = self
        return fake

    def product(self, rows: int, columns: int, depth: int) -> None:
        self.flop += 2.0 * rows * columns * depth

    def passes(self, *arrays: Array) -> None:
        self.moved_bytes += sum(array.nbytes for array in arrays)

    def spent(self) -> tuple[float, float]:
        spent, self.flop, self.moved_bytes = (self.flop, self.moved_bytes), 0.0, 0.0
        return spent


class NoMemory(Host):
    """Device whose arrays are fake and not counted, because `rank_memory` counts a module's arrays."""

    def __init__(self, memory: FakeMemory) -> None:
        self.activations = memory

    def empty(self, size: int, dtype: Any = np.float32) -> Array:
        return self.activations.outside((size,), dtype)

    zeros = empty


@contextmanager
def without_memory(memory: FakeMemory) -> Iterator[None]:
    """Return a context in which arrays of any device are fake."""
    in_use = device.in_use()
    device.adopt(NoMemory(memory))
    try:
        yield
    finally:
        device.adopt(in_use)


FLOAT = 4  # bytes of a score
Operation = TypeVar("Operation", bound=Callable[..., Any])


def fake(definition: Any) -> Callable[[Operation], Operation]:
    """Return a decorator: the function is called in place of an operation if arrays are fake."""
    return lambda function: OPERATIONS[definition.__name__].register(FakeArray, function)


def lines(x: Array) -> int:
    """Return the number of rows of x (..., C) as a matrix."""
    return math.prod(x.shape[:-1])


# ----------------------------------------------------------------------------------- elementwise, and norms


def elementwise(x: Array, reads: int) -> Array:
    """Return an array of x's shape; count one write and `reads` reads of such an array."""
    y = x.memory.take(x.shape, x.dtype)
    x.memory.passes(*[y] * (reads + 1))
    return y


def norm_backward(dy: Array, x: Array, w: Array, *others: Array | None, vectors: int) -> Array:
    """Return dx of a norm. `others`: statistics, gradients of the norm's vectors, and an addend of dx."""
    gradients, addends = others[vectors : 2 * vectors], others[2 * vectors :]
    dx = elementwise(x, reads=2 + any(array is not None for array in addends))
    x.memory.norm_sums(x, sum(gradient is not None for gradient in gradients))
    return dx


@fake(ops.rope)
def _(x: Array, cos: Array, sin: Array, interleaved: bool, out: Array | None = None) -> Array:
    if out is None:
        return elementwise(x, reads=1)
    x.memory.passes(out, out)
    return out


# ------------------------------------------------------------------------------------- products and lookups


@fake(ops.linear)
def _(x: Array, w: Array, b: Array | None = None, plus: Array | None = None) -> Array:
    memory = x.memory
    y = memory.take((*x.shape[:-1], w.shape[0]), x.dtype)
    memory.product(lines(x), *w.shape)
    if plus is not None or b is not None:
        memory.passes(y, y, *([] if plus is None else [plus]))
    return y


@fake(ops.linear_backward_x)
def _(dy: Array, w: Array, into: Array | None = None) -> Array:
    dy.memory.product(lines(dy), *w.shape)
    return dy.memory.take((*dy.shape[:-1], w.shape[1]), dy.dtype) if into is None else into


@fake(ops.route)
def _(logits: Array, used: int, normalized: bool) -> tuple[Array, ...]:
    memory, (tokens, count) = logits.memory, logits.shape
    p, experts = memory.take(logits.shape, logits.dtype), memory.take((tokens, used), np.int64)
    rows, of_row = (memory.take((tokens * used,), np.int64) for _ in range(2))
    memory.passes(p, p)
    weights = memory.take((tokens * used, 1), logits.dtype)
    return p, experts, rows, of_row, weights, memory.take((count + 1,), np.int64)


def grouped(x: Array, w: Array, starts: Array, addend: Array | None = None, *, axis: int) -> Array:
    """Return the products of rows and stacked matrices; dx is added to `addend` if it is given."""
    x.memory.product(x.shape[0], *w.shape[1:])
    if isinstance(w, PackedStack):
        unpacked = x.memory.take(w.shape[1:], x.dtype)
        x.memory.passes(*[unpacked] * min(x.shape[0], w.shape[0]))
        del unpacked
    return x.memory.take((x.shape[0], w.shape[axis]), x.dtype) if addend is None or axis == 1 else addend


def column_sums(dy: Array, rows: int, width: int) -> None:
    dy.memory.passes(dy)
    dy.memory.column_sums(rows, width)


@fake(ops.embedding)
def _(tokens: Array, w: Array) -> Array:
    memory = tokens.memory
    y = memory.take((*tokens.shape, w.shape[1]), w.dtype)
    memory.passes(y, y)
    return y


@fake(ops.embedding_backward)
def _(tokens: Array, dy: Array, dw: Array) -> None:
    memory = tokens.memory
    memory.passes(dy, dy, dy)
    memory.sorted_tokens(tokens, dy.shape[-1])


# ---------------------------------------------------------------------------------------- attention and loss


@fake(ops.causal_attention)
def _(q: Array, k: Array, v: Array, scale: float, begins: Array | None = None) -> tuple[Array, Any]:
    y, saved = q.memory.attention(q, k, v, begins)
    count_attention(q, k, q.shape[3] + v.shape[3], 3, begins)  # maximum, exponentials, weights
    return y, (*saved, begins)


@fake(ops.causal_attention_backward)
def _(dy: Array, q: Array, k: Array, v: Array, saved: Any, scale: float) -> tuple[Array, Array, Array]:
    memory = dy.memory
    (dq, dk, dv), recompute = memory.attention_backward(dy, q, k, v, saved)
    count_attention(q, k, (3 if recompute else 2) * q.shape[3] + 2 * v.shape[3], 4, saved[-1])
    return dq, dk, dv


def count_attention(q: Array, k: Array, widths: int, passes: int, begins: Array | None) -> None:
    """Count the work of attention, without blocks above the diagonal and, on a CPU, without unseen keys."""
    memory, (batch, length, heads, _) = q.memory, q.shape
    size = batch * head_weights(length, k.shape[1])
    if begins is not None and memory.skips_unseen:
        size -= unseen_weights(begins)
    memory.product(heads, size, widths)
    memory.moved_bytes += passes * FLOAT * heads * size * memory.moves_scores(q, begins)


@fake(ops.cross_entropy)
def _(logits: Array, targets: Array, scale: float) -> tuple[float, Array]:
    logits.memory.logits = int(logits.nbytes)
    return 0.0, elementwise(logits, reads=3)


@fake(ops.linear_cross_entropy)
def _(
    x: Array,
    w: Array,
    b: Any,
    targets: Array,
    scale: float,
    dw: Any = None,
    db: Any = None,
    need_dx: bool = True,
) -> tuple[float, Array | None]:
    memory = x.memory
    logits, dx = memory.logits_and_dx(x, w, need_dx)
    if db is not None:
        memory.column_sums(len(logits), w.shape[0])
    memory.logits = max(memory.logits, int(logits.nbytes))
    for _ in range(1 + (dw is not None) + need_dx):
        memory.product(lines(x), *w.shape)
    passes = 4 + (b is not None) + (db is not None)  # maximum, exponentials, weights, gradient
    memory.moved_bytes += passes * logits.itemsize * lines(x) * w.shape[0]
    return 0.0, dx


# ------------------------------------------------------------------------------------ operations of one line


@merged.register(FakeArray)
def _(w: Array, a: Array, b: Array, scale: float, kind: str) -> Array:
    w.memory.passes(*[w] * len(a))
    product, out = w.memory.take(w.shape), w.memory.take(w.shape)
    del product
    return out


@rows_of.register(FakeArray)
def _(starts: Array, members: slice, count: int) -> tuple[slice, Array]:
    """Assume that all experts have equally many rows."""
    experts = len(starts) - 1
    first, last, _ = members.indices(experts)
    return slice(count * first // experts, count * last // experts), starts[first : last + 1]


@split_tokens.register(FakeArray)
def _(tokens: Array, first: int) -> tuple[Array, Array, Array]:
    empty = tokens.reshape(-1)[:0]  # assume no added tokens, since texts have few
    return tokens, empty, empty


OF_ONE_LINE: dict[Any, Callable[..., Any]] = {
    ops.positions_backward: lambda dy, dw: column_sums(dy, dy.shape[0], dw.size),
    ops.rms_norm_backward: partial(norm_backward, vectors=1),
    ops.layer_norm_backward: partial(norm_backward, vectors=2),
    ops.linear_backward_w: lambda dy, x, dw: dy.memory.product(lines(dy), *dw.shape),
    ops.grouped_linear_backward_w: lambda dy, x, dw, starts: dy.memory.product(len(dy), *dw.shape[1:]),
    ops.grouped_linear: partial(grouped, axis=1),
    ops.grouped_linear_backward_x: partial(grouped, axis=2),
    ops.linear_backward_b: lambda dy, db: column_sums(dy, lines(dy), dy.shape[-1]),
}
for _definition, _function in OF_ONE_LINE.items():
    fake(_definition)(_function)


signature = cache(inspect.signature)


def one_pass(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a fake operation: make the results in its signature and count a pass over each array."""
    arguments, memory = signature(operation).bind(*args, **kwargs).arguments, args[0].memory
    shapes = signatures.results_of(operation.signature, arguments)
    results = [0.0 if shape is None else memory.take(*shape) for shape in shapes]
    memory.passes(*(x for x in (*arguments.values(), *results) if isinstance(x, np.ndarray)))
    return tuple(results) if len(results) > 1 else next(iter(results), None)


for _operation in OPERATIONS.values():
    if FakeArray not in _operation.registry:
        _operation.register(FakeArray, partial(one_pass, _operation))
