"""Compiled kernels on several threads: rows that do not need each other are shared out.

A kernel runs on one thread and lets go of the interpreter's lock, so Python's own threads are enough. Parts
are equal runs of rows, one for each thread, and the thread that asks takes the last one. What is computed
for a row by itself has the same bits on any number of threads; sums over rows are added up part by part, in
the order of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from typing import Any, TypeVar

import numpy as np

from zero_mpi.device.types import Array

T = TypeVar("T")

LEAST = 1 << 14  # elements a part: to wake a thread takes some ten microseconds
EVEN = 256  # elements that parts of flat arrays are multiples of: whole vectors, as in one loop over all

_threads = 1
_pool: ThreadPoolExecutor | None = None


def use(count: int) -> None:
    """Let kernels of this process run on so many threads."""
    global _threads, _pool
    if _pool is not None:
        _pool.shutdown()
    _threads = count
    _pool = ThreadPoolExecutor(count - 1, "zero_mpi-kernels") if count > 1 else None


def in_use() -> int:
    """How many there are."""
    return _threads


def cut(shape: tuple[int, ...], even: int = 1) -> list[slice]:
    """Equal parts of the rows of such an array, multiples of `even`; one part where there is little."""
    rows = shape[0]
    parts = min(_threads, rows // even, prod(shape) // LEAST)
    if parts < 2:
        return [slice(0, rows)]
    ends = [rows * part // parts // even * even for part in range(1, parts)] + [rows]
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def run(calls: Sequence[Callable[[], T]]) -> list[T]:
    """The results of calls, in order; the last one is made here, the others on threads of their own."""
    if _pool is None or len(calls) < 2:
        return [call() for call in calls]
    others = [_pool.submit(call) for call in calls[:-1]]
    last = calls[-1]()
    return [*(other.result() for other in others), last]


def in_parts(shape: tuple[int, ...], work: Callable[[slice], T], even: int = 1) -> list[T]:
    """What `work` gives for each part of the rows of an array of a shape; see `cut`."""
    if _threads == 1:
        return [work(slice(0, shape[0]))]
    return run([partial(work, part) for part in cut(shape, even)])


def in_numbered_parts(shape: tuple[int, ...], work: Callable[[slice, int], T]) -> list[T]:
    """As `in_parts`, where `work` is told the number of its part as well."""
    return run([partial(work, part, number) for number, part in enumerate(cut(shape))])


def flat_parts(kernel: Callable[..., Any], *arrays: Array) -> None:
    """Call a kernel that works element by element on parts of flat arrays."""
    if _threads == 1:
        kernel(*arrays)
        return
    in_parts(arrays[0].shape, lambda part: kernel(*(array[part] for array in arrays)), EVEN)


def with_sums(shape: tuple[int, ...], work: Callable[..., None], *sums: Array) -> None:
    """Call `work(part, *sums)`, which adds sums over its rows to them; several parts each have their own."""
    parts = cut(shape)
    if len(parts) == 1:
        work(parts[0], *sums)
        return

    def alone(part: slice) -> list[Array]:
        own = [np.zeros_like(total) for total in sums]
        work(part, *own)
        return own

    for own in run([partial(alone, part) for part in parts]):
        for total, more in zip(sums, own, strict=True):
            total += more
