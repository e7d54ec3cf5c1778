"""Kernels that unpack blocks of GGUF (`ops.block_kinds`) in one pass, or multiply them by a vector.

Each kind has one function, which emits code for the elements of a block in vectors of sixteen float32. One
kernel stores these vectors, bit-identical to `reference.dequantize`. Another kernel returns the dot product
of a row of blocks and an input. llama.cpp's ggml-common.h defines the byte layout of each kind.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from zero_mpi.device.types import Array
from zero_mpi.ops import ggml, reference
from zero_mpi.ops.block_kinds import BLOCK_KINDS, PACKED, RARE
from zero_mpi.ops.cpu.jit import (
    BYTE,
    ELEMENTS,
    HALF,
    LOW,
    PLACE,
    PLACES,
    SINGLE,
    SINGLES,
    SIXTEEN,
    WORD,
    alike,
    bits,
    constant,
    intrinsic_of,
    kernel,
    load_at,
    nearest_low,
    store_at,
)
from zero_mpi.ops.registry import implements
from zero_mpi.ops.threads import in_parts

BYTES = ir.VectorType(BYTE, ELEMENTS)
TOTALS = 4  # independent sums per row: an addition takes four cycles


class Block:
    """Emitter of code that reads parts of the block at an address; a word has 32 bits."""

    def __init__(self, builder: Any, place: Any) -> None:
        self.builder, self._place = builder, place

    def read(self, offset: int, kind: Any) -> Any:
        return load_at(self.builder, self.builder.add(self._place, PLACE(offset)), kind)

    def byte(self, offset: int) -> Any:
        """Return the unsigned byte at an offset as a word."""
        return self.builder.zext(self.read(offset, BYTE), WORD)

    def signed(self, offset: int) -> Any:
        """Return the signed byte at an offset as a float32."""
        return self.builder.sitofp(self.read(offset, BYTE), SINGLE)

    def half(self, offset: int) -> Any:
        """Return a float16 as float32: shift its bits, then multiply to correct the exponent."""
        b, word = self.builder, self.builder.zext(self.read(offset, HALF), WORD)
        body = b.shl(b.and_(word, WORD(0x7FFF)), WORD(13))
        finite = b.fmul(b.bitcast(body, SINGLE), SINGLE(2.0**112))  # difference of exponent biases: 112
        top = b.icmp_unsigned(">=", body, WORD(0x7C00 << 13))
        body = b.select(top, b.or_(body, WORD(0x7F800000)), b.bitcast(finite, WORD))
        return b.bitcast(b.or_(body, b.shl(b.and_(word, WORD(0x8000)), WORD(16))), SINGLE)

    def sixteen(self, offset: int, shift: int = 0, mask: int = 255) -> Any:
        """Return sixteen bytes as words, shifted to the right and masked."""
        vector = self.read(offset, BYTES)
        vector = self.builder.lshr(vector, ir.Constant(BYTES, [shift] * ELEMENTS)) if shift else vector
        vector = self.builder.and_(vector, ir.Constant(BYTES, [mask] * ELEMENTS)) if mask < 255 else vector
        return self.builder.zext(vector, SIXTEEN)

    def all_lanes(self, number: Any) -> Any:
        """Return a vector of sixteen copies of a number."""
        undefined = ir.Constant(ir.VectorType(number.type, ELEMENTS), ir.Undefined)
        first = self.builder.insert_element(undefined, number, WORD(0))
        return self.builder.shuffle_vector(first, undefined, constant(0))

    def scaled(self, words: Any, factor: Any, least: Any = None) -> Any:
        """Return signed words as float32 times `factor`, plus the minimum `least` unless it is None."""
        b = self.builder
        product = b.fmul(b.sitofp(words, SINGLES), self.all_lanes(factor))
        return product if least is None else b.fadd(product, self.all_lanes(least))

    def with_bits(self, low: Any, high: Any, place: int) -> Any:
        """Return `low` with the bits of `high` inserted from bit `place` on."""
        return self.builder.or_(low, self.builder.shl(high, constant(place)))

    def times(self, factor: Any, word: Any) -> Any:
        return self.builder.fmul(factor, self.builder.sitofp(word, SINGLE))

    def part(self, word: Any, shift: int, mask: int) -> Any:
        return self.builder.and_(self.builder.lshr(word, WORD(shift)), WORD(mask))


def plain_8(x: Block) -> list[Any]:
    """Read Q8_0: a scale, 32 signed bytes."""
    b, d = x.builder, x.half(0)
    return [x.scaled(b.sext(x.read(offset, BYTES), SIXTEEN), d) for offset in (2, 18)]


def nibbles(x: Block, has_least: bool) -> list[Any]:
    """Read Q4_0 and Q4_1: a scale, a minimum if `has_least`, 16 bytes whose low halves come first."""
    d, (least, start) = x.half(0), (x.half(2), 4) if has_least else (None, 2)
    halves = [x.sixteen(start, shift, 15) for shift in (0, 4)]
    return [x.scaled(q if has_least else x.builder.sub(q, constant(8)), d, least) for q in halves]


def five_bits(x: Block, has_least: bool) -> list[Any]:
    """Read Q5_0 and Q5_1: like Q4_0 and Q4_1, with four bytes of fifth bits before the 16 bytes."""
    b, d, (least, start) = x.builder, x.half(0), (x.half(2), 4) if has_least else (None, 2)
    tops, vectors = x.all_lanes(x.read(start, WORD)), []
    for shift in (0, 4):
        lanes = ir.Constant(SIXTEEN, [4 * shift + lane for lane in range(ELEMENTS)])
        q = x.with_bits(x.sixteen(start + 4, shift, 15), b.and_(b.lshr(tops, lanes), constant(1)), 4)
        vectors.append(x.scaled(q if has_least else b.sub(q, constant(16)), d, least))
    return vectors


def two_bits(x: Block) -> list[Any]:
    """Read Q2_K: 16 bytes, each a 4-bit scale and 4-bit minimum; 64 bytes of 2-bit elements; two factors."""
    d, least, vectors = x.half(80), x.builder.fneg(x.half(82)), []
    for j in range(16):
        pair = x.byte(j)
        q = x.sixteen(16 + 32 * (j >> 3) + 16 * (j & 1), 2 * ((j >> 1) & 3), 3)
        vectors.append(x.scaled(q, x.times(d, x.part(pair, 0, 15)), x.times(least, x.part(pair, 4, 15))))
    return vectors


def three_bits(x: Block) -> list[Any]:
    """Read Q3_K: 32 bytes of third bits, 64 bytes of bit pairs, 12 bytes of 6-bit scales, a factor."""
    b, d, vectors = x.builder, x.half(108), []
    for j in range(16):
        low = x.part(x.byte(96 + (j & 7)), 4 * (j >> 3), 15)
        high = x.part(x.byte(104 + (j & 3)), 2 * (j >> 2), 3)
        scale = b.sub(b.or_(low, b.shl(high, WORD(4))), WORD(32))
        q = x.sixteen(32 + 32 * (j >> 3) + 16 * (j & 1), 2 * ((j >> 1) & 3), 3)
        q = x.with_bits(q, b.and_(x.sixteen(16 * (j & 1), j >> 1), constant(1)), 2)
        vectors.append(x.scaled(b.sub(q, constant(4)), x.times(d, scale)))
    return vectors


def scaled_bits(x: Block, has_fifth: bool) -> list[Any]:
    """Read Q4_K and Q5_K: two factors, eight scales and minima, fifth bits if any, 128 bytes of low bits."""
    b, d, least, vectors = x.builder, x.half(0), x.builder.fneg(x.half(2)), []
    for j in range(8):  # the eight scales and minima have six bits each, packed in twelve bytes
        if j < 4:
            scale, minimum = x.part(x.byte(4 + j), 0, 63), x.part(x.byte(8 + j), 0, 63)
        else:
            pair = x.byte(8 + j)
            scale = b.or_(x.part(pair, 0, 15), b.shl(x.part(x.byte(j), 6, 3), WORD(4)))
            minimum = b.or_(x.part(pair, 4, 15), b.shl(x.part(x.byte(4 + j), 6, 3), WORD(4)))
        dl, ml = x.times(d, scale), x.times(least, minimum)
        for i in (0, ELEMENTS):
            q = x.sixteen((48 if has_fifth else 16) + 32 * (j >> 1) + i, 4 * (j & 1), 15)
            if has_fifth:
                q = x.with_bits(q, b.and_(x.sixteen(16 + i, j), constant(1)), 4)
            vectors.append(x.scaled(q, dl, ml))
    return vectors


def six_bits(x: Block) -> list[Any]:
    """Read Q6_K: 128 bytes of low four bits, 64 bytes of high two bits, sixteen signed scales, a factor."""
    b, d, vectors = x.builder, x.half(208), []
    for j in range(16):
        half, place = j >> 3, 16 * (j & 7)
        low = x.sixteen(64 * half + (place & 63), 4 * (place >> 6), 15)
        high = b.and_(x.sixteen(128 + 32 * half + (place & 31), 2 * (place >> 5)), constant(3))
        q = b.sub(x.with_bits(low, high, 4), constant(32))
        vectors.append(x.scaled(q, b.fmul(d, x.signed(192 + j))))
    return vectors


EMITTERS: dict[str, Callable[[Block], list[Any]]] = {
    "Q8_0": plain_8,
    "Q4_0": lambda x: nibbles(x, False),
    "Q4_1": lambda x: nibbles(x, True),
    "Q5_0": lambda x: five_bits(x, False),
    "Q5_1": lambda x: five_bits(x, True),
    "Q2_K": two_bits,
    "Q3_K": three_bits,
    "Q4_K": lambda x: scaled_bits(x, False),
    "Q5_K": lambda x: scaled_bits(x, True),
    "Q6_K": six_bits,
}


def each_block(
    builder: Any, number: Any, place: Any, blocks: Any, work: Callable[[int, Any, Any], None]
) -> None:
    """Emit a loop over blocks of kind PACKED[number]; `work(block size, index, vectors)` emits its body."""
    end = builder.append_basic_block("after")
    cases = builder.switch(number, end)
    for index, name in enumerate(PACKED):
        case = builder.append_basic_block(name)
        cases.add_case(PLACE(index), case)
        builder.position_at_end(case)
        kind = BLOCK_KINDS[name]
        with cgutils.for_range(builder, blocks) as loop:
            address = builder.add(place, builder.mul(loop.index, PLACE(kind.nbytes)))
            work(kind.elements, loop.index, EMITTERS[name](Block(builder, address)))
        builder.branch(end)
    builder.position_at_end(end)


def place_of(builder: Any, start: Any, index: Any, step: int, nbytes: int) -> Any:
    """Return the address `step` bytes into block `index`, where a block has `nbytes` bytes."""
    return builder.add(start, builder.add(builder.mul(index, PLACE(nbytes)), PLACE(step)))


@intrinsic  # type: ignore[untyped-decorator]
def unpack_blocks(context: Any, number: Any, raw: Any, out: Any, blocks: Any, low: Any) -> Any:
    """Write the elements of blocks at address `raw` to address `out`, as float32, or bfloat16 if `low`."""
    narrows = low == LOW
    width = 2 if narrows else 4

    def emit(builder: Any, number: Any, raw: Any, out: Any, blocks: Any, _: Any) -> None:
        def write(elements: int, index: Any, vectors: list[Any]) -> None:
            for i, vector in enumerate(vectors):
                if narrows:
                    words = nearest_low(builder, vector, SIXTEEN, constant)
                    vector = builder.trunc(words, ir.VectorType(HALF, ELEMENTS))
                place = place_of(builder, out, index, i * ELEMENTS * width, elements * width)
                store_at(builder, vector, place)

        each_block(builder, number, raw, blocks, write)

    return intrinsic_of(types.void(PLACES, PLACES, PLACES, PLACES, low), emit)


@intrinsic  # type: ignore[untyped-decorator]
def row_product(context: Any, number: Any, raw: Any, x: Any, blocks: Any) -> Any:
    """Return the dot product of the blocks at address `raw` and the float32 numbers at address `x`."""

    def emit(builder: Any, number: Any, raw: Any, x: Any, blocks: Any) -> Any:
        totals = [cgutils.alloca_once(builder, SINGLES) for _ in range(TOTALS)]
        for total in totals:
            builder.store(ir.Constant(SINGLES, [0.0] * ELEMENTS), total)

        def add(elements: int, index: Any, vectors: list[Any]) -> None:
            for i, vector in enumerate(vectors):
                place = place_of(builder, x, index, i * ELEMENTS * 4, elements * 4)
                product = builder.fmul(vector, load_at(builder, place, SINGLES, 4), flags=["contract"])
                total = totals[i % TOTALS]
                builder.store(builder.fadd(builder.load(total), product, flags=["contract"]), total)

        each_block(builder, number, raw, blocks, add)
        first, second, third, fourth = (builder.load(total) for total in totals)
        vector = builder.fadd(builder.fadd(first, second), builder.fadd(third, fourth))
        lanes = [builder.extract_element(vector, WORD(lane)) for lane in range(ELEMENTS)]
        while len(lanes) > 1:
            lanes = [builder.fadd(*pair) for pair in zip(lanes[::2], lanes[1::2], strict=True)]
        return lanes[0]

    return intrinsic_of(types.float32(PLACES, PLACES, PLACES, PLACES), emit)


@kernel("u1 e1+ i i", liberties=False)
def unpack(raw: Array, out: Array, number: int, blocks: int) -> None:
    """Unpack full blocks of kind PACKED[number] into `out`."""
    unpack_blocks(number, raw.ctypes.data, out.ctypes.data, blocks, out[0])


@implements(reference.dequantize)
def dequantize(raw: Array, kind: str, out: Array) -> None:
    packed = kind in PACKED and alike(out)
    if not (packed or kind in RARE) or not out.flags.c_contiguous or not out.size:
        reference.dequantize(raw, kind, out)
        return
    block, raw = BLOCK_KINDS[kind], np.ascontiguousarray(raw)

    def work(blocks: slice) -> None:
        part = raw[blocks.start * block.nbytes : blocks.stop * block.nbytes]
        target = out[blocks.start * block.elements : blocks.stop * block.elements]
        if packed:
            unpack(part, bits(target), PACKED.index(kind), blocks.stop - blocks.start)
        elif not ggml.dequantize(part, kind, target):
            reference.dequantize(part, kind, target)

    in_parts((out.size // block.elements, block.elements), work)
