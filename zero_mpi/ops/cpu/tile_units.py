"""Instructions that numba lacks: those of tile units (AMX), and some on sixteen elements at a time.

Each is an intrinsic of kernels that emits its instructions. Addresses are integers. Import it only where
`products.by_tiles` does: elsewhere the compiler lacks these instructions and ends the process.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from zero_mpi.ops.cpu.jit import WORD, nearest_low

LANES = 16  # elements at a time
PLACE, BYTE, HALF = types.int64, ir.IntType(8), ir.IntType(16)


def instruction(name: str, tiles: tuple[Any, ...], *others: Any) -> Any:
    """Return an intrinsic of one instruction: its arguments are constant tile numbers, an address, a step."""
    if not all(isinstance(tile, types.IntegerLiteral) for tile in tiles):
        return None  # numba asks again, with constants

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        numbers = [BYTE(tile.literal_value) for tile in tiles]
        place = [builder.inttoptr(value, BYTE.as_pointer()) for value in values[len(tiles) :][:1]]
        given = [*numbers, *place, *values[len(tiles) + 1 :]]
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in given])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), given)
        return context.get_dummy_value()

    return types.void(*tiles, *(PLACE for _ in others)), codegen


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def configure(context: Any, place: Any) -> Any:
    """Configure the tiles of this thread by a configuration at an address."""
    return instruction("ldtilecfg", (), place)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def release(context: Any) -> Any:
    """Release the tiles of this thread."""
    return instruction("tilerelease", ())


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def clear(context: Any, tile: Any) -> Any:
    """Fill a tile with zeros."""
    return instruction("tilezero", (tile,))


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def add_product(context: Any, total: Any, a: Any, b: Any) -> Any:
    """Add to tile `total`, float32, the product of tiles a and b."""
    return instruction("tdpbf16ps", (total, a, b))


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def load(context: Any, tile: Any, place: Any, step: Any) -> Any:
    """Fill a tile with rows from an address on, `step` bytes apart."""
    return instruction("tileloadd64", (tile,), place, step)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def store(context: Any, tile: Any, place: Any, step: Any) -> Any:
    """Write a tile's rows from an address on, `step` bytes apart."""
    return instruction("tilestored64", (tile,), place, step)


def vector_at(builder: Any, place: Any, element: Any) -> Any:
    """Return a pointer to sixteen elements at an address."""
    return builder.inttoptr(place, ir.VectorType(element, LANES).as_pointer())


def loaded(builder: Any, place: Any, element: Any) -> Any:
    """Load sixteen elements from an unaligned address."""
    vector = builder.load(vector_at(builder, place, element))
    vector.align = 1
    return vector


def stored(builder: Any, vector: Any, place: Any) -> None:
    """Write sixteen elements to an unaligned address."""
    builder.store(vector, vector_at(builder, place, vector.type.element)).align = 1


def constant(number: int) -> Any:
    """Return sixteen words of one number."""
    return ir.Constant(ir.VectorType(WORD, LANES), [number] * LANES)


def pairs_of(builder: Any, above: Any, below: Any) -> Any:
    """Return sixteen pairs of elements at two addresses, each pair a word, the first in its lower half."""
    words = ir.VectorType(WORD, LANES)
    low, high = (builder.zext(loaded(builder, place, HALF), words) for place in (above, below))
    return builder.or_(low, builder.shl(high, constant(16)))


def transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose sixteen vectors of words: blocks of 1, 2, 4 and 8 across the diagonal change places."""
    for step in (1, 2, 4, 8):
        for i in (each for each in range(LANES) if not each & step):
            first, second = rows[i], rows[i + step]
            upper = [lane + LANES - step if lane & step else lane for lane in range(LANES)]
            lower = [lane + LANES if lane & step else lane + step for lane in range(LANES)]
            for place, lanes in ((i, upper), (i + step, lower)):
                order = ir.Constant(ir.VectorType(WORD, LANES), lanes)
                rows[place] = builder.shuffle_vector(first, second, order)
    return rows


def steps_from(builder: Any, start: Any, step: Any) -> list[Any]:
    """Return sixteen addresses, one step from each to the next."""
    place = ir.IntType(64)
    return [builder.add(start, builder.mul(step, place(i))) for i in range(LANES)]


@intrinsic  # type: ignore[untyped-decorator]
def pair_lines(context: Any, above: Any, below: Any, out: Any) -> Any:
    """Write sixteen pairs of elements of two rows, all three by address."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        stored(builder, pairs_of(builder, values[0], values[1]), values[2])
        return context.get_dummy_value()

    return types.void(PLACE, PLACE, PLACE), codegen


@intrinsic  # type: ignore[untyped-decorator]
def turn(context: Any, start: Any, step: Any, out: Any, out_step: Any) -> Any:
    """Write a block of 16 x 16 words as its transpose; rows are `step` and `out_step` bytes apart."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        rows = [loaded(builder, place, WORD) for place in steps_from(builder, values[0], values[1])]
        for vector, place in zip(
            transposed(builder, rows), steps_from(builder, values[2], values[3]), strict=True
        ):
            stored(builder, vector, place)
        return context.get_dummy_value()

    return types.void(PLACE, PLACE, PLACE, PLACE), codegen


@intrinsic  # type: ignore[untyped-decorator]
def turn_elements(context: Any, start: Any, step: Any, out: Any, out_step: Any) -> Any:
    """Write 32 rows of 16 elements as their transpose, 16 rows of 32."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        start, step, out, out_step = values
        above = steps_from(builder, start, builder.add(step, step))
        rows = [pairs_of(builder, place, builder.add(place, step)) for place in above]
        for vector, place in zip(transposed(builder, rows), steps_from(builder, out, out_step), strict=True):
            stored(builder, vector, place)
        return context.get_dummy_value()

    return types.void(PLACE, PLACE, PLACE, PLACE), codegen


@intrinsic  # type: ignore[untyped-decorator]
def narrow_line(context: Any, sums: Any, out: Any) -> Any:
    """Write sixteen float32 as the nearest bfloat16, as `jit.narrow` does."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        numbers = loaded(builder, values[0], ir.FloatType())
        words = nearest_low(builder, numbers, ir.VectorType(WORD, LANES), constant)
        stored(builder, builder.trunc(words, ir.VectorType(HALF, LANES)), values[1])
        return context.get_dummy_value()

    return types.void(PLACE, PLACE), codegen
