"""The compute threads of a rank, and the division of its computations into independent parts.

A kernel or a product runs on one thread and releases the interpreter's lock, so Python's own threads are
enough. Matmul libraries are limited to one thread: more threads would spin on the cores that our threads
need. Parts are equal ranges of rows, at most one for each thread; the calling thread computes the last part.
Results that depend on one row are bit-identical for any number of threads. Sums over rows are added part by
part, in the order of the rows.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from math import prod
from typing import Any, TypeVar

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from zero_mpi.device.types import Array

T = TypeVar("T")

LEAST = 1 << 16  # minimum elements per part: waking a thread and waiting for it takes fifty microseconds
LEAST_PRODUCT = 1 << 22  # minimum multiplications per part of a product, for the same reason
EVEN_ROWS = 16  # the rows of a part of a matrix are a multiple of this, like the blocks of matmul libraries
EVEN = 256  # the length of a part of a flat array is a multiple of this, so that loops run over full vectors

_threads = 1
_pool: ThreadPoolExecutor | None = None
rest_word: Array = np.zeros(1, np.int64)  # if not zero, threads in `ops.cpu.decode` stop waiting


@cache
def of_libraries() -> int:
    """Return the matmul libraries' own default number of threads; call it before `use`."""
    return max((pool["num_threads"] for pool in threadpool_info()), default=1)


def use(count: int) -> None:
    """Compute on `count` threads in this process from now on."""
    global _threads, _pool
    of_libraries()
    threadpool_limits(1)
    rest_word[0] = 1
    if _pool is not None:
        _pool.shutdown()
    _threads = count
    _pool = ThreadPoolExecutor(count - 1, "zero_mpi-compute") if count > 1 else None


def count() -> int:
    """Return the number of compute threads, including the calling thread."""
    return _threads


def start(work: Callable[..., T], *arguments: Any) -> Future[T]:
    """Start a call on another compute thread; this process must have more than one."""
    assert _pool is not None
    return _pool.submit(work, *arguments)


def cut(shape: tuple[int, ...], even: int = 1) -> list[slice]:
    """Return slices that divide an array's rows about equally, at multiples of `even`; one if it is small."""
    return equal_parts(shape[0], min(_threads, prod(shape) // LEAST), even)


def equal_parts(rows: int, parts: int, even: int) -> list[slice]:
    """Return `parts` slices that divide `rows` almost equally, at multiples of `even`; fewer for few rows."""
    parts = min(parts, rows // even)
    if parts < 2:
        return [slice(0, rows)]
    ends = [rows * part // parts // even * even for part in range(1, parts)] + [rows]
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def run(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Run calls on all threads, the last call on this thread; return their results in order."""
    if _pool is None or len(calls) < 2:
        return [call() for call in calls]
    rest_word[0] = 1
    futures = [_pool.submit(call) for call in calls[:-1]]
    last = calls[-1]()
    return [*(future.result() for future in futures), last]


def in_parts(shape: tuple[int, ...], work: Callable[[slice], T], even: int = 1) -> list[T]:
    """Return the results of `work` for each part of the rows of an array; see `cut`."""
    if _threads == 1:
        return [work(slice(0, shape[0]))]
    return run([partial(work, part) for part in cut(shape, even)])


def flat_parts(kernel: Callable[..., Any], *arrays: Array) -> None:
    """Call an elementwise kernel on parts of flat arrays."""
    if _threads == 1:
        kernel(*arrays)
        return
    in_parts(arrays[0].shape, lambda part: kernel(*(array[part] for array in arrays)), EVEN)


def shared(product: Callable[..., Array]) -> Callable[..., Array]:
    """Return a version of `product`(a, b, c, bias=, plus=, adds=) that uses all threads.

    A single matrix c is cut by rows, or by columns if it is wide; many matrices are divided among threads.
    """
    if _threads == 1:
        return product

    def multiply(a: Array, b: Array, c: Array, **options: Any) -> Array:
        lead = c.shape[:-2] or c.shape
        axis = lead.index(max(lead))
        most = min(_threads, c.size * a.shape[-1] // LEAST_PRODUCT)
        parts = equal_parts(c.shape[axis], most, EVEN_ROWS if c.ndim == 2 else 1)
        run([partial(product, **cut_product(part, axis, a=a, b=b, c=c, **options)) for part in parts])
        return c

    return multiply


def cut_product(part: slice, axis: int, **arrays: Any) -> dict[str, Any]:
    """Return the arguments of a product for a part of c (..., M, N) along one of its axes."""
    place, lead, rows, columns = (slice(None),) * axis + (part,), arrays["c"].ndim > 2, axis == 0, axis == 1
    cuts = {"a": lead or rows, "b": lead or columns, "c": True, "plus": True, "bias": columns}
    return {
        name: x[part if name == "bias" else place] if x is not None and cuts.get(name) else x
        for name, x in arrays.items()
    }


def with_sums(shape: tuple[int, ...], work: Callable[..., None], *sums: Array) -> None:
    """Call `work(part, *sums)` for each part. Several parts add to separate arrays, which are then added."""
    parts = cut(shape)
    if len(parts) == 1:
        work(parts[0], *sums)
        return

    def alone(part: slice) -> list[Array]:
        partials = [np.zeros_like(total) for total in sums]
        work(part, *partials)
        return partials

    for partials in run([partial(alone, part) for part in parts]):
        for total, term in zip(sums, partials, strict=True):
            total += term
