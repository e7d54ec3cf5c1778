"""Threads that wait for work inside compiled code: products of one row take less time than to wake a thread.

A crew shares the rows of one product at a time. The caller puts a description of the product into words that
all threads see, and then the number of parts that are left; each thread takes parts until there are none. A
thread that has waited for `PATIENCE` rounds ends, as it does if `threads.run` needs its place.
"""

from __future__ import annotations

import platform
from concurrent.futures import Future
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from zero_mpi.device.types import Array
from zero_mpi.ops import threads
from zero_mpi.ops.block_kinds import BLOCK_KINDS, PACKED
from zero_mpi.ops.cpu.dequantize import PLACE, SINGLE, row_product
from zero_mpi.ops.cpu.jit import fixed_helper, kernel

PATIENCE = 1 << 15  # rounds of waiting: about a millisecond
PARTS = 4  # parts per thread: one that is held up leaves its parts to others
LEAST_ROWS = 16  # rows of a part
# Words that threads share; those that change in a product have a cache line of their own.
LEFT, DONE, REST, ROWS, ALL_PARTS, NUMBER, BLOCKS, RAW, WIDTH, X, Y = 0, 8, 16, 24, 25, 26, 27, 28, 29, 30, 31
WORDS = 32


def at_place(kind: Any, arguments: tuple[Any, ...], emit: Any) -> Any:
    """Return an intrinsic whose first argument is an address: emit(builder, pointer, other values)."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        element = SINGLE if types.float32 in signature.args else PLACE
        pointer = builder.inttoptr(values[0], element.as_pointer())
        found = emit(builder, pointer, *values[1:])
        return context.get_dummy_value() if found is None else found

    return kind(types.int64, *arguments), codegen


@intrinsic  # type: ignore[untyped-decorator]
def seen(context: Any, place: Any) -> Any:
    """Return a word that another thread may change."""
    return at_place(types.int64, (), lambda b, at: b.load_atomic(at, "acquire", 8))


@intrinsic  # type: ignore[untyped-decorator]
def show(context: Any, place: Any, word: Any) -> Any:
    """Write a word, after all that was written before."""

    def emit(builder: Any, at: Any, word: Any) -> None:
        builder.store_atomic(word, at, "release", 8)

    return at_place(types.void, (types.int64,), emit)


@intrinsic  # type: ignore[untyped-decorator]
def add_one(context: Any, place: Any) -> Any:
    """Add one to a word, and return what it was."""
    return at_place(types.int64, (), lambda b, at: b.atomic_rmw("add", at, PLACE(1), "acq_rel"))


@intrinsic  # type: ignore[untyped-decorator]
def take(context: Any, place: Any, word: Any) -> Any:
    """Subtract one from a word if it is still `word`; return whether it was."""

    def emit(builder: Any, at: Any, word: Any) -> Any:
        found = builder.cmpxchg(at, word, builder.sub(word, PLACE(1)), "acq_rel", "acquire")
        return builder.extract_value(found, 1)

    return at_place(types.boolean, (types.int64,), emit)


@intrinsic  # type: ignore[untyped-decorator]
def put(context: Any, place: Any, value: Any) -> Any:
    """Write a float32."""

    def emit(builder: Any, at: Any, value: Any) -> None:
        builder.store(value, at)

    return at_place(types.void, (types.float32,), emit)


@intrinsic  # type: ignore[untyped-decorator]
def pause(context: Any) -> Any:
    """Tell the processor that this thread waits, where there is an instruction for it."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), codegen


@fixed_helper
def take_parts(words: Array, place: int) -> bool:
    """Compute parts of the product until none is left; return whether there were any."""
    found = False
    left = seen(place + 8 * LEFT)
    while left > 0:
        if take(place + 8 * LEFT, left):
            rows, parts = words[ROWS], words[ALL_PARTS]
            for i in range(rows * (left - 1) // parts, rows * left // parts):
                raw = words[RAW] + i * words[WIDTH]
                put(words[Y] + 4 * i, row_product(words[NUMBER], raw, words[X], words[BLOCKS]))
            add_one(place + 8 * DONE)
            found = True
        left = seen(place + 8 * LEFT)
    return found


@kernel("i1+", liberties=False)
def serve(words: Array) -> None:
    """Take parts of products, until none comes for a while."""
    place, waited = words.ctypes.data, 0
    while waited < PATIENCE and seen(place + 8 * REST) == 0:
        waited = 0 if take_parts(words, place) else waited + 1
        pause()


@kernel("i1+ u2 f1 f1+ i i i", liberties=False)
def share(words: Array, raw: Array, x: Array, y: Array, number: int, blocks: int, parts: int) -> None:
    """Fill y (O,) with the product of each row of blocks (O, bytes) and x, in parts that all threads take."""
    words[ROWS], words[ALL_PARTS], words[NUMBER], words[BLOCKS] = y.size, parts, number, blocks
    words[RAW], words[WIDTH] = raw.ctypes.data, raw.shape[1]
    words[X], words[Y] = x.ctypes.data, y.ctypes.data
    place = words.ctypes.data
    show(place + 8 * DONE, 0)
    show(place + 8 * LEFT, parts)
    take_parts(words, place)
    while seen(place + 8 * DONE) < parts:
        pause()


class Crew:
    """The waiting threads of this process: the places of `threads`' pool, until others need them."""

    def __init__(self) -> None:
        self._words, self._servants = np.zeros(WORDS, np.int64), list[Future[None]]()
        threads.resting = self._words[REST : REST + 1]

    def multiply(self, raw: Array, kind: str, x: Array, y: Array) -> None:
        """Fill y (N, O) with x (N, C) W^T for a matrix W of blocks, raw (O, bytes); all are contiguous."""
        others = threads.count() - 1
        self._servants = [each for each in self._servants if not each.done()]
        if len(self._servants) < others:
            self._words[REST] = 0
            self._servants += [threads.start(serve, self._words) for _ in range(others - len(self._servants))]
        number, blocks = PACKED.index(kind), x.shape[1] // BLOCK_KINDS[kind].elements
        parts = min(PARTS * others, len(raw) // LEAST_ROWS) or 1
        for row, out in zip(x, y, strict=True):
            share(self._words, raw, row, out, number, blocks, parts)


@cache
def crew() -> Crew:
    """Return the crew of this process."""
    return Crew()
