"""Threads that wait for work inside compiled code: products of one row take less time than to wake a thread.

A crew computes instructions (`ops.cpu.decode`) one step after the other. The caller puts the number of a step
into words that all threads see, and then the number of its parts that are left; each thread takes parts until
there are none. A thread that has waited for `PATIENCE` rounds ends, as it does if `threads.run` needs its
place.
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
from zero_mpi.ops.cpu.decode import AT_ONCE, COLUMNS, PARTS, compute, words_at
from zero_mpi.ops.cpu.jit import PLACE, PLACES, emitted, fixed_helper, kernel

PATIENCE = 1 << 15  # rounds of waiting: about a millisecond
# Words that threads share; those that change in a step have a cache line of their own.
LEFT, DONE, REST, STEP, PROGRAM, SEQUENCES, POSITIONS = 0, 8, 16, 24, 25, 26, 27
WORDS = 32


def word_at(builder: Any, place: Any) -> Any:
    """Return an address as a pointer to a word."""
    return builder.inttoptr(place, PLACE.as_pointer())


@intrinsic  # type: ignore[untyped-decorator]
def seen(context: Any, place: Any) -> Any:
    """Return a word that another thread may change."""
    return emitted(PLACES(PLACES), lambda b, place: b.load_atomic(word_at(b, place), "acquire", 8))


@intrinsic  # type: ignore[untyped-decorator]
def show(context: Any, place: Any, word: Any) -> Any:
    """Write a word, after all that was written before."""

    def emit(builder: Any, place: Any, word: Any) -> None:
        builder.store_atomic(word, word_at(builder, place), "release", 8)

    return emitted(types.void(PLACES, PLACES), emit)


@intrinsic  # type: ignore[untyped-decorator]
def add_one(context: Any, place: Any) -> Any:
    """Add one to a word, and return what it was."""
    return emitted(
        PLACES(PLACES), lambda b, place: b.atomic_rmw("add", word_at(b, place), PLACE(1), "acq_rel")
    )


@intrinsic  # type: ignore[untyped-decorator]
def take(context: Any, place: Any, word: Any) -> Any:
    """Subtract one from a word if it is still `word`; return whether it was."""

    def emit(b: Any, place: Any, word: Any) -> Any:
        found = b.cmpxchg(word_at(b, place), word, b.sub(word, PLACE(1)), "acq_rel", "acquire")
        return b.extract_value(found, 1)

    return emitted(types.boolean(PLACES, PLACES), emit)


@intrinsic  # type: ignore[untyped-decorator]
def pause(context: Any) -> Any:
    """Tell the processor that this thread waits, where there is an instruction for it."""

    def emit(builder: Any) -> None:
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])

    return emitted(types.void(), emit)


@fixed_helper
def take_parts(words: Array, place: int) -> bool:
    """Compute parts of the step until none is left; return whether there were any."""
    found = False
    left = seen(place + 8 * LEFT)
    while left > 0:
        if take(place + 8 * LEFT, left):
            step, part = words[PROGRAM] + 8 * COLUMNS * words[STEP], left - 1
            line = words_at(step, COLUMNS)
            while part >= line[PARTS]:
                part -= line[PARTS]
                step += 8 * COLUMNS
                line = words_at(step, COLUMNS)
            compute(line, part, words[SEQUENCES], words_at(words[POSITIONS], words[SEQUENCES]))
            add_one(place + 8 * DONE)
            found = True
        left = seen(place + 8 * LEFT)
    return found


@kernel("i1+", liberties=False)
def serve(words: Array) -> None:
    """Compute parts of steps until none has come for `PATIENCE` rounds or `threads` needs this thread."""
    place, waited = words.ctypes.data, 0
    while waited < PATIENCE and seen(place + 8 * REST) == 0:
        waited = 0 if take_parts(words, place) else waited + 1
        pause()


@kernel("i1+ i2 i1", liberties=False)
def run_steps(words: Array, program: Array, positions: Array) -> None:
    """Compute all instructions for sequences at these positions, in parts that all threads take."""
    words[PROGRAM], words[POSITIONS], words[SEQUENCES] = (
        program.ctypes.data,
        positions.ctypes.data,
        positions.size,
    )
    place, step = words.ctypes.data, 0
    while step < len(program):
        after, parts = step + program[step, AT_ONCE], 0
        for line in range(step, after):
            parts += program[line, PARTS]
        if parts == 1:
            compute(
                words_at(words[PROGRAM] + 8 * COLUMNS * step, COLUMNS),
                0,
                positions.size,
                words_at(words[POSITIONS], positions.size),
            )
        else:
            words[STEP] = step
            show(place + 8 * DONE, 0)
            show(place + 8 * LEFT, parts)
            take_parts(words, place)
            while seen(place + 8 * DONE) < parts:
                pause()
        step = after


class Crew:
    """The waiting threads of this process, which occupy the pool of `threads` until other work needs it."""

    def __init__(self) -> None:
        self._words, self._servants = np.zeros(WORDS, np.int64), list[Future[None]]()
        threads.resting = self._words[REST : REST + 1]

    def run(self, program: Array, positions: Array) -> None:
        """Compute instructions (N, COLUMNS) for sequences at `positions` (B,), both int64."""
        others = threads.count() - 1
        self._servants = [each for each in self._servants if not each.done()]
        if len(self._servants) < others:
            self._words[REST] = 0
            self._servants += [threads.start(serve, self._words) for _ in range(others - len(self._servants))]
        run_steps(self._words, program, positions)


@cache
def crew() -> Crew:
    """Return the crew of this process."""
    return Crew()
