"""Compiled instructions for generation, which `nn.decoding` records: a run computes one token per sequence.

An instruction is a row of words: its operation, then addresses and sizes. Activations are float32 and have
one row per sequence. One call of compiled code runs the instructions of all layers for a position. Threads
share the parts of an instruction. Instructions that do not depend on each other form a step.

A crew of threads waits for steps inside compiled code, because a product of one row takes less time than
waking a thread. The caller writes the index of a step and then the number of its parts into words that all
threads see, and each thread takes parts until none is left. Then the next step begins. A thread leaves the
crew when it has waited for `PATIENCE` rounds or `threads.run` needs the pool.
"""

import platform
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from zero_mpi.device.arrays import address
from zero_mpi.device.types import Array
from zero_mpi.ops import threads
from zero_mpi.ops.block_kinds import BLOCK_KINDS, PACKED
from zero_mpi.ops.cpu.dequantize import row_product
from zero_mpi.ops.cpu.elementwise import gelu_share
from zero_mpi.ops.cpu.jit import (
    LIBERTIES,
    ONE,
    PLACE,
    PLACES,
    ZERO,
    exponential,
    f4,
    fixed_helper,
    floats,
    intrinsic_of,
    kernel,
)

MATRIX, DENSE, NORM, CENTRED_NORM, TURN, KEEP, ATTEND, SWIGLU, GEGLU, GELU, ADD, SCALE = range(12)
COLUMNS = 16
# Columns of all instructions: the operation, the number of instructions in its step, the number of its parts,
# and the addresses of input and output. The meaning of A to H depends on the operation.
OPERATION, AT_ONCE, PARTS, X, Y, A, B, C, D, E, F, G, H = range(13)

PART = 1 << 15  # matrix elements in a part of a product, which takes about two microseconds
MOST_PARTS = 64

compiled: Callable[[Any], Any] = numba.njit(fastmath=LIBERTIES, error_model="numpy")


def product(w: Any, x: Array, y: Array) -> list[int]:
    """Return the instruction for y (B, O) = x (B, C) W^T, where W is packed or contiguous float32."""
    outputs, columns = w.shape
    parts = max(1, min(MOST_PARTS, outputs * columns // PART))
    if isinstance(w, np.ndarray):
        return [DENSE, parts, address(x), address(y), address(w), 4 * columns, 0, 0, outputs, columns]
    kind, blocks = PACKED.index(w.kind), columns // BLOCK_KINDS[w.kind].elements
    raw = [address(w.raw), w.raw.shape[1], kind, blocks]
    return [MATRIX, parts, address(x), address(y), *raw, outputs, columns]


def instructions(*steps: list[list[int]]) -> Array:
    """Return the instructions of all steps, in order, as one array (N, COLUMNS)."""
    lines = [[line[0], len(step), *line[1:]] for step in steps for line in step]
    return np.array([line + [0] * (COLUMNS - len(line)) for line in lines], np.int64)


def word_at(builder: Any, place: Any) -> Any:
    """Return an address as a pointer to a word."""
    return builder.inttoptr(place, PLACE.as_pointer())


@intrinsic  # type: ignore[untyped-decorator]
def to_words(context: Any, place: Any) -> Any:
    return intrinsic_of(types.CPointer(PLACES)(PLACES), word_at)


@numba.njit(inline="always")  # type: ignore[untyped-decorator]
def words_at(place: int, size: int) -> Any:
    return numba.carray(to_words(place), size)


@compiled
def multiply_rows(line: Array, part: int, sequences: int) -> None:
    """Compute a part of y (E,) = W x (F,). A: address of W, B: bytes of a row, C: kind, D: blocks per row."""
    x, outputs, columns = line[X], line[E], line[F]
    first, last = outputs * part // line[PARTS], outputs * (part + 1) // line[PARTS]
    for n in range(sequences):
        y = floats(line[Y] + 4 * n * outputs, outputs)
        for i in range(first, last):
            if line[OPERATION] == MATRIX:
                y[i] = row_product(line[C], line[A] + i * line[B], x + 4 * n * columns, line[D])
            else:
                row, xs = floats(line[A] + i * line[B], columns), floats(x + 4 * n * columns, columns)
                total = ZERO
                for j in range(columns):
                    total += row[j] * xs[j]
                y[i] = total


@compiled
def normalize(line: Array, sequences: int) -> None:
    """Normalize x into y. A: weights, B: biases, C: width, D: vectors per sequence, E: address of epsilon."""
    width, epsilon = line[C], floats(line[E], 1)[0]
    w = floats(line[A], width)
    for i in range(sequences * line[D]):
        x, y = floats(line[X] + 4 * i * width, width), floats(line[Y] + 4 * i * width, width)
        middle, square = ZERO, ZERO
        if line[OPERATION] == CENTRED_NORM:
            for j in range(width):
                middle += x[j]
            middle /= f4(width)
        for j in range(width):
            square += (x[j] - middle) * (x[j] - middle)
        q = ONE / np.sqrt(square / f4(width) + epsilon)
        for j in range(width):
            y[j] = (x[j] - middle) * q * w[j]
        if line[OPERATION] == CENTRED_NORM:
            b = floats(line[B], width)
            for j in range(width):
                y[j] += b[j]


@compiled
def turn(line: Array, sequences: int, positions: Array) -> None:
    """Rotate E of D elements in each of C heads in place, in adjacent pairs if F. A: cosines, B: sines."""
    half, heads, neighbours = line[E] // 2, line[C], line[F] != 0
    for n in range(sequences):
        cos = floats(line[A] + 4 * positions[n] * half, half)
        sin = floats(line[B] + 4 * positions[n] * half, half)
        for h in range(heads):
            x = floats(line[X] + 4 * (n * heads + h) * line[D], 2 * half)
            for j in range(half):
                first, second = (2 * j, 2 * j + 1) if neighbours else (j, j + half)
                a, b = x[first], x[second]
                x[first], x[second] = a * cos[j] - b * sin[j], b * cos[j] + a * sin[j]


@compiled
def keep(line: Array, sequences: int, positions: Array) -> None:
    """Write x (A,) to the cache y (B, A) at the position of each sequence."""
    size = line[A]
    for n in range(sequences):
        x = floats(line[X] + 4 * n * size, size)
        y = floats(line[Y] + 4 * (n * line[B] + positions[n]) * size, size)
        for i in range(size):
            y[i] = x[i]


@compiled
def attend(line: Array, head: int, sequences: int, positions: Array) -> None:
    """Compute a head. A: keys, B: values, C: capacity, D: window, E: scale, F, G: widths, H: key heads."""
    heads, key_width, width = line[PARTS], line[F], line[G]
    group = head * line[H] // heads
    for n in range(sequences):
        start, stop = 0, positions[n] + 1
        if 0 < line[D] < stop:
            start = stop - line[D]
        q = floats(line[X] + 4 * (n * heads + head) * key_width, key_width)
        scores, most, total = np.empty(stop - start, np.float32), f4(-np.inf), ZERO
        for t in range(start, stop):
            k = floats(line[A] + 4 * ((n * line[C] + t) * line[H] + group) * key_width, key_width)
            score = ZERO
            for j in range(key_width):
                score += q[j] * k[j]
            scores[t - start] = score * floats(line[E], 1)[0]
            most = max(most, scores[t - start])
        for t in range(stop - start):
            scores[t] = exponential(scores[t] - most)
            total += scores[t]
        y = floats(line[Y] + 4 * (n * heads + head) * width, width)
        y[:] = ZERO
        for t in range(start, stop):
            v = floats(line[B] + 4 * ((n * line[C] + t) * line[H] + group) * width, width)
            share = scores[t - start] / total
            for j in range(width):
                y[j] += share * v[j]


@compiled
def combine(line: Array, sequences: int, positions: Array) -> None:
    """Compute y (A,) from x and the array at address B, element by element.

    C says what the array holds: a row per sequence (0), one row (1), or a row per position (2).
    """
    size, operation = line[A], line[OPERATION]
    for n in range(sequences):
        x, y = floats(line[X] + 4 * n * size, size), floats(line[Y] + 4 * n * size, size)
        row = n if line[C] == 0 else positions[n] if line[C] == 2 else 0
        operand = floats(line[B] + 4 * row * size, size)
        if operation == SWIGLU:
            for i in range(size):
                y[i] = x[i] / (ONE + exponential(-x[i])) * operand[i]
        elif operation == GEGLU:
            for i in range(size):
                y[i] = x[i] * gelu_share(x[i]) * operand[i]
        elif operation == GELU:
            for i in range(size):
                y[i] = x[i] * gelu_share(x[i])
        elif operation == ADD:
            for i in range(size):
                y[i] = x[i] + operand[i]
        else:
            for i in range(size):
                y[i] = x[i] * operand[0]


@compiled
def compute(line: Array, part: int, sequences: int, positions: Array) -> None:
    """Compute a part of an instruction."""
    operation = line[OPERATION]
    if operation <= DENSE:
        multiply_rows(line, part, sequences)
    elif operation <= CENTRED_NORM:
        normalize(line, sequences)
    elif operation == TURN:
        turn(line, sequences, positions)
    elif operation == KEEP:
        keep(line, sequences, positions)
    elif operation == ATTEND:
        attend(line, part, sequences, positions)
    else:
        combine(line, sequences, positions)


# ------------------------------------------------------------------------------------------------ the crew

PATIENCE = 1 << 15  # rounds of waiting: about a millisecond
# Words that threads share. Each word that changes during a step has its own cache line.
LEFT, DONE, REST, STEP, PROGRAM, SEQUENCES, POSITIONS = 0, 8, 16, 24, 25, 26, 27
WORDS = 32


@intrinsic  # type: ignore[untyped-decorator]
def read_word(context: Any, place: Any) -> Any:
    """Read a word that another thread may change."""
    return intrinsic_of(PLACES(PLACES), lambda b, place: b.load_atomic(word_at(b, place), "acquire", 8))


@intrinsic  # type: ignore[untyped-decorator]
def write_word(context: Any, place: Any, word: Any) -> Any:
    """Write a word such that other threads see it only after all earlier writes."""

    def emit(builder: Any, place: Any, word: Any) -> None:
        builder.store_atomic(word, word_at(builder, place), "release", 8)

    return intrinsic_of(types.void(PLACES, PLACES), emit)


@intrinsic  # type: ignore[untyped-decorator]
def add_one(context: Any, place: Any) -> Any:
    """Add one to a word, and return its earlier value."""
    return intrinsic_of(
        PLACES(PLACES), lambda b, place: b.atomic_rmw("add", word_at(b, place), PLACE(1), "acq_rel")
    )


@intrinsic  # type: ignore[untyped-decorator]
def take(context: Any, place: Any, word: Any) -> Any:
    """Subtract one from the word at `place` if it equals `word`; return whether it did."""

    def emit(b: Any, place: Any, word: Any) -> Any:
        pair = b.cmpxchg(word_at(b, place), word, b.sub(word, PLACE(1)), "acq_rel", "acquire")
        return b.extract_value(pair, 1)

    return intrinsic_of(types.boolean(PLACES, PLACES), emit)


@intrinsic  # type: ignore[untyped-decorator]
def pause(context: Any) -> Any:
    """Run the processor's instruction for waiting loops, if it has one."""

    def emit(builder: Any) -> None:
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])

    return intrinsic_of(types.void(), emit)


@fixed_helper
def take_parts(words: Array, place: int) -> bool:
    """Compute parts of the step until no part is left; return whether this thread computed any."""
    busy = False
    remaining = read_word(place + 8 * LEFT)
    while remaining > 0:
        if take(place + 8 * LEFT, remaining):
            step, part = words[PROGRAM] + 8 * COLUMNS * words[STEP], remaining - 1
            line = words_at(step, COLUMNS)
            while part >= line[PARTS]:
                part -= line[PARTS]
                step += 8 * COLUMNS
                line = words_at(step, COLUMNS)
            compute(line, part, words[SEQUENCES], words_at(words[POSITIONS], words[SEQUENCES]))
            add_one(place + 8 * DONE)
            busy = True
        remaining = read_word(place + 8 * LEFT)
    return busy


@kernel("i1+", liberties=False)
def serve(words: Array) -> None:
    """Compute parts of steps; return after `PATIENCE` rounds without a step, or if REST is not zero."""
    place, waited = words.ctypes.data, 0
    while waited < PATIENCE and read_word(place + 8 * REST) == 0:
        waited = 0 if take_parts(words, place) else waited + 1
        pause()


@kernel("i1+ i2 i1", liberties=False)
def run_steps(words: Array, program: Array, positions: Array) -> None:
    """Compute all instructions for sequences at these positions; all threads share the parts."""
    words[PROGRAM], words[POSITIONS] = program.ctypes.data, positions.ctypes.data
    words[SEQUENCES] = positions.size
    place, step = words.ctypes.data, 0
    while step < len(program):
        next_step, parts = step + program[step, AT_ONCE], 0
        for line in range(step, next_step):
            parts += program[line, PARTS]
        if parts == 1:
            line = words_at(words[PROGRAM] + 8 * COLUMNS * step, COLUMNS)
            compute(line, 0, positions.size, words_at(words[POSITIONS], positions.size))
        else:
            words[STEP] = step
            write_word(place + 8 * DONE, 0)
            write_word(place + 8 * LEFT, parts)
            take_parts(words, place)
            while read_word(place + 8 * DONE) < parts:
                pause()
        step = next_step


class Crew:
    """Threads of the pool that wait for instructions, until other work needs the pool."""

    def __init__(self) -> None:
        self._words, self._servants = np.zeros(WORDS, np.int64), list[Future[None]]()
        threads.rest_word = self._words[REST : REST + 1]

    def run(self, program: Array, positions: Array) -> None:
        """Compute instructions (N, COLUMNS) for sequences at `positions` (B,), both int64."""
        count = threads.count() - 1
        self._servants = [servant for servant in self._servants if not servant.done()]
        if len(self._servants) < count:
            self._words[REST] = 0
            self._servants += [threads.start(serve, self._words) for _ in range(count - len(self._servants))]
        run_steps(self._words, program, positions)


@cache
def crew() -> Crew:
    return Crew()
