"""Products of many small bfloat16 matrices, computed by a processor's tile units (AMX), for attention.

A tile has 16 rows of 64 bytes. One instruction adds the product of two tiles to a third tile: 16 x 32
elements by 32 x 16, with the second factor as pairs of rows (TDPBF16PS in Intel's Intrinsics Guide). Four
tiles hold 32 x 32 sums. In a product a b, b is packed as row pairs; a is packed unless its rows form full
tiles. oneDNN copies heads whose rows are far apart, which takes longer than the product (docs/benchmarks.md).

Import this module only through `products.by_tiles`: without AMX, LLVM aborts the process.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from zero_mpi.device.types import Array
from zero_mpi.ops.cpu.jit import (
    BYTE,
    ELEMENTS,
    HALF,
    PLACE,
    PLACES,
    SINGLES,
    SIXTEEN,
    bits,
    constant,
    fixed_helper,
    helper,
    intrinsic_of,
    kernel,
    load_at,
    narrow,
    nearest_low,
    store_at,
    wide,
)

ROWS, PANEL, DEPTH = 16, 32, 32  # rows of a tile; rows and columns of a result block; elements of a tile row
ROW_BYTES, EACH, LOW_BYTES = 64, 4, 2  # bytes of a tile's row, of a float32 or a bfloat16 pair, of a bfloat16


def instruction(name: str, tiles: tuple[Any, ...], *operands: Any) -> Any:
    """Return an intrinsic of one instruction on constant tile numbers, an address and a stride."""
    if not all(isinstance(tile, types.IntegerLiteral) for tile in tiles):
        return None  # numba then calls this function again with literal tile numbers

    def emit(builder: Any, *values: Any) -> None:
        numbers = [BYTE(tile.literal_value) for tile in tiles]
        place = [builder.inttoptr(value, BYTE.as_pointer()) for value in values[len(tiles) :][:1]]
        arguments = [*numbers, *place, *values[len(tiles) + 1 :]]
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in arguments])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), arguments)

    return intrinsic_of(types.void(*tiles, *(PLACES for _ in operands)), emit)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def configure(context: Any, place: Any) -> Any:
    """Configure this thread's tiles by the configuration at address `place`."""
    return instruction("ldtilecfg", (), place)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def release(context: Any) -> Any:
    return instruction("tilerelease", ())


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def clear(context: Any, tile: Any) -> Any:
    return instruction("tilezero", (tile,))


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def add_product(context: Any, total: Any, a: Any, b: Any) -> Any:
    """Add the product of tiles a and b to the float32 tile `total`."""
    return instruction("tdpbf16ps", (total, a, b))


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def load(context: Any, tile: Any, place: Any, step: Any) -> Any:
    """Fill a tile with rows that start at an address and are `step` bytes apart."""
    return instruction("tileloadd64", (tile,), place, step)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def store(context: Any, tile: Any, place: Any, step: Any) -> Any:
    """Write a tile's rows to an address, `step` bytes apart."""
    return instruction("tilestored64", (tile,), place, step)


def pairs_of(builder: Any, above: Any, below: Any) -> Any:
    """Return sixteen words: lower halves from address `above`, upper halves from address `below`."""
    kind = ir.VectorType(HALF, ELEMENTS)
    low, high = (builder.zext(load_at(builder, place, kind), SIXTEEN) for place in (above, below))
    return builder.or_(low, builder.shl(high, constant(16)))


def transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose sixteen vectors of words: exchange blocks of 1, 2, 4 and 8 words across the diagonal."""
    for step in (1, 2, 4, 8):
        for i in (row for row in range(ELEMENTS) if not row & step):
            first, second = rows[i], rows[i + step]
            upper = [lane + ELEMENTS - step if lane & step else lane for lane in range(ELEMENTS)]
            lower = [lane + ELEMENTS if lane & step else lane + step for lane in range(ELEMENTS)]
            for place, lanes in ((i, upper), (i + step, lower)):
                order = ir.Constant(SIXTEEN, lanes)
                rows[place] = builder.shuffle_vector(first, second, order)
    return rows


def steps_from(builder: Any, start: Any, step: Any) -> list[Any]:
    """Return sixteen addresses from `start` on, `step` bytes apart."""
    return [builder.add(start, builder.mul(step, PLACE(i))) for i in range(ELEMENTS)]


@intrinsic  # type: ignore[untyped-decorator]
def pair_lines(context: Any, above: Any, below: Any, out: Any) -> Any:
    """Write sixteen pairs of elements, one element from each of two rows; all arguments are addresses."""
    return intrinsic_of(
        types.void(PLACES, PLACES, PLACES), lambda b, up, down, out: store_at(b, pairs_of(b, up, down), out)
    )


@intrinsic  # type: ignore[untyped-decorator]
def turn(context: Any, start: Any, step: Any, out: Any, out_step: Any) -> Any:
    """Write the transpose of a block of 16 x 16 words; rows are `step` and `out_step` bytes apart."""

    def emit(builder: Any, start: Any, step: Any, out: Any, out_step: Any) -> None:
        rows = [load_at(builder, place, SIXTEEN) for place in steps_from(builder, start, step)]
        for vector, place in zip(transposed(builder, rows), steps_from(builder, out, out_step), strict=True):
            store_at(builder, vector, place)

    return intrinsic_of(types.void(PLACES, PLACES, PLACES, PLACES), emit)


@intrinsic  # type: ignore[untyped-decorator]
def turn_elements(context: Any, start: Any, step: Any, out: Any, out_step: Any) -> Any:
    """Write the transpose of 32 rows of 16 elements, as 16 rows of 32 elements."""

    def emit(builder: Any, start: Any, step: Any, out: Any, out_step: Any) -> None:
        starts = steps_from(builder, start, builder.add(step, step))
        rows = [pairs_of(builder, place, builder.add(place, step)) for place in starts]
        for vector, place in zip(transposed(builder, rows), steps_from(builder, out, out_step), strict=True):
            store_at(builder, vector, place)

    return intrinsic_of(types.void(PLACES, PLACES, PLACES, PLACES), emit)


@intrinsic  # type: ignore[untyped-decorator]
def narrow_line(context: Any, sums: Any, out: Any) -> Any:
    """Round sixteen float32 numbers to bfloat16, as `jit.narrow` does; both arguments are addresses."""

    def emit(builder: Any, sums: Any, out: Any) -> None:
        words = nearest_low(builder, load_at(builder, sums, SINGLES), SIXTEEN, constant)
        store_at(builder, builder.trunc(words, ir.VectorType(HALF, ELEMENTS)), out)

    return intrinsic_of(types.void(PLACES, PLACES), emit)


# ------------------------------------------------------------------------------------------------ products


TILES = np.zeros(64, np.uint8)  # configuration: the first palette, and eight tiles of 16 rows of 64 bytes
TILES[0], TILES[16:32:2], TILES[48:56] = 1, ROW_BYTES, ROWS


@helper
def pair_of(x: Array, i: int, j: int, down: int, right: int) -> Any:
    """Return x[i, j] and x[i + down, j + right] as halves of a word; elements outside x are zero."""
    low, high = np.uint32(x[i, j]), np.uint32(0)
    if i + down < x.shape[0] and j + right < x.shape[1]:
        high = np.uint32(x[i + down, j + right])
    return low | np.uint32(high << np.uint32(16))


@fixed_helper
def pack_pairs(b: Array, packed: Array) -> None:
    """Pack row pairs of b (K, N) into panels of 16 columns, (N / 16, K / 2, 16); do not write padding."""
    (k, n), (down, right), start = b.shape, b.strides, b.ctypes.data
    for first in range(0, n, ROWS):
        panel, place = packed[first // ROWS], start + first * right
        out, full_rows = panel.ctypes.data, 0
        if first + ROWS <= n:
            if right == LOW_BYTES:
                full_rows = k // 2 * 2
                for i in range(0, full_rows, 2):
                    pair_lines(place + i * down, place + (i + 1) * down, out + i // 2 * ROW_BYTES)
            else:
                full_rows = k // DEPTH * DEPTH
                for i in range(0, full_rows, DEPTH):
                    turn(place + i * LOW_BYTES, right, out + i // 2 * ROW_BYTES, ROW_BYTES)
        for i in range(full_rows, k, 2):
            for j in range(first, min(first + ROWS, n)):
                panel[i // 2, j - first] = pair_of(b, i, j, 1, 0)


@fixed_helper
def pack_rows(a: Array, packed: Array) -> None:
    """Pack pairs of elements of a (M, K) into packed (M, K / 2); do not write padding."""
    (m, k), (down, right), start = a.shape, a.strides, a.ctypes.data
    full_rows, full_columns = (m // ROWS * ROWS, k // DEPTH * DEPTH) if down == LOW_BYTES else (0, 0)
    for i in range(0, full_rows, ROWS):
        for j in range(0, full_columns, DEPTH):
            out = packed.ctypes.data + i * packed.strides[0] + j * LOW_BYTES
            turn_elements(start + i * down + j * right, right, out, packed.strides[0])
    for i in range(m):
        for j in range(full_columns if i < full_rows else 0, k, 2):
            packed[i, j // 2] = pair_of(a, i, j, 0, 1)


@helper
def add_panel(a: Any, a_step: Any, b: Any, next_b: Any, depth: Any) -> None:
    """Add the product of 32 rows at address a and the panels at addresses b and next_b to tiles 0 to 3."""
    for k in range(0, depth, DEPTH):
        load(4, a + k * LOW_BYTES, a_step)
        load(5, a + k * LOW_BYTES + ROWS * a_step, a_step)
        load(6, b + k // 2 * ROW_BYTES, ROW_BYTES)
        load(7, next_b + k // 2 * ROW_BYTES, ROW_BYTES)
        add_product(0, 4, 6)
        add_product(1, 4, 7)
        add_product(2, 5, 6)
        add_product(3, 5, 7)


@helper
def begin(out: Any, step: Any, adds: Any) -> None:
    """Load a block of 32 x 32 sums into tiles 0 to 3 if `adds`; otherwise fill these tiles with zeros."""
    if adds:
        load(0, out, step)
        load(1, out + ROW_BYTES, step)
        load(2, out + ROWS * step, step)
        load(3, out + ROWS * step + ROW_BYTES, step)
    else:
        clear(0)
        clear(1)
        clear(2)
        clear(3)


@helper
def end(out: Any, step: Any) -> None:
    """Write tiles 0 to 3 as a block of 32 x 32 sums."""
    store(0, out, step)
    store(1, out + ROW_BYTES, step)
    store(2, out + ROWS * step, step)
    store(3, out + ROWS * step + ROW_BYTES, step)


@fixed_helper
def put(c: Array, sums: Array, adds: bool) -> None:
    """Write the first M rows and N columns of `sums` to c, or add them to c; round if c is bfloat16."""
    m, n = c.shape
    rounds = c.itemsize == LOW_BYTES and n == PANEL and not adds
    for i in range(m):
        if rounds:
            place, out = sums[i].ctypes.data, c[i].ctypes.data
            narrow_line(place, out)
            narrow_line(place + ROW_BYTES, out + ROWS * LOW_BYTES)
        else:
            for j in range(n):
                c[i, j] = narrow(c, wide(c[i, j]) + sums[i, j] if adds else sums[i, j])


@kernel("l4~ l4~ e4~+ b u1")
def multiply_many(a: Array, b: Array, c: Array, adds: bool, tiles: Array) -> None:
    """Compute c (..., M, N) = a (..., M, K) b (..., K, N), plus c if `adds`."""
    (m, k), n = a.shape[2:], b.shape[3]
    depth, columns = (k + DEPTH - 1) // DEPTH * DEPTH, (n + PANEL - 1) // PANEL * PANEL
    pairs = np.zeros((columns // ROWS, depth // 2, ROWS), np.uint32)
    rows, sums = np.zeros((PANEL, depth // 2), np.uint32), np.empty((PANEL, PANEL), np.float32)
    lies_by_tiles = a.strides[3] == LOW_BYTES and k == depth
    configure(tiles.ctypes.data)
    for x in range(c.shape[0]):
        for y in range(c.shape[1]):
            pack_pairs(b[x, y], pairs)
            for i in range(0, m, PANEL):
                part = a[x, y, i : i + PANEL]
                place, step = part.ctypes.data, part.strides[0]
                if not lies_by_tiles or part.shape[0] < PANEL:
                    pack_rows(part, rows)
                    place, step = rows.ctypes.data, rows.strides[0]
                for j in range(0, columns, PANEL):
                    block = c[x, y, i : i + PANEL, j : j + PANEL]
                    in_place = block.itemsize == EACH and block.shape[0] == block.shape[1] == PANEL
                    out, line = block.ctypes.data, block.strides[0]
                    if not in_place:
                        out, line = sums.ctypes.data, PANEL * EACH
                    begin(out, line, in_place and adds)
                    panel = j // ROWS
                    add_panel(place, step, pairs[panel].ctypes.data, pairs[panel + 1].ctypes.data, depth)
                    end(out, line)
                    if not in_place:
                        put(block, sums, adds)
    release()


def multiply(a: Array, b: Array, c: Array, *, adds: bool = False) -> Array:
    """Compute and return c (B, H, M, N) = a (B, H, M, K) b (B, H, K, N), plus c if `adds`.

    a and b are bfloat16; c is bfloat16 or float32. Each array has contiguous rows or contiguous columns.
    """
    multiply_many(bits(a), bits(b), bits(c), adds, TILES)
    return c
