"""Unpacks blocks of GGUF (`ops.block_kinds`) to float32 or bfloat16, in one pass to the layers' buffer.

It is compiled without fast-math: each element has the bits of `reference.dequantize`, for any scale. The
byte layout of a kind is that of llama.cpp's ggml-common.h.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zero_mpi.device.types import Array
from zero_mpi.ops import reference
from zero_mpi.ops.block_kinds import BLOCK_KINDS, PACKED
from zero_mpi.ops.cpu.jit import alike, bits, f4, fixed_helper, kernel, narrow
from zero_mpi.ops.registry import implements
from zero_mpi.ops.threads import in_parts

i4 = np.int32
HALF_EXPONENT = np.uint32(0x7C00)
RESCALED = f4(2.0**112)  # between the exponents of float16 and float32
Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K = range(len(PACKED))


@fixed_helper
def half(raw: Array, at: int) -> Any:
    """Return the float16 in two bytes as float32: move its bits, then correct its exponent by a product."""
    word = np.uint32(raw[at]) | np.uint32(np.uint32(raw[at + 1]) << np.uint32(8))
    body = np.uint32((word & np.uint32(0x7FFF)) << np.uint32(13))
    sign = np.uint32((word & np.uint32(0x8000)) << np.uint32(16))
    if word & HALF_EXPONENT == HALF_EXPONENT:
        return np.uint32(body | sign | np.uint32(0x7F800000)).view(np.float32)
    return np.uint32(body | sign).view(np.float32) * RESCALED


@fixed_helper
def scale_and_least(packed: Array, j: int) -> Any:
    """Return the 6-bit scale and minimum of the j-th of eight sub-blocks, from twelve bytes."""
    if j < 4:
        return i4(packed[j] & 63), i4(packed[j + 4] & 63)
    high = packed[j + 4]
    return (
        i4(high & 15) | i4(i4(packed[j - 4] >> 6) << 4),
        i4(high >> 4) | i4(i4(packed[j] >> 6) << 4),
    )


@fixed_helper
def scale_of_16(packed: Array, j: int) -> Any:
    """Return the 6-bit scale of the j-th of sixteen sub-blocks, from twelve bytes, less 32."""
    low = i4(packed[j & 7]) >> i4(4 * (j >> 3))
    high = i4(packed[8 + (j & 3)]) >> i4(2 * (j >> 2))
    return i4((low & i4(15)) | i4((high & i4(3)) << i4(4))) - i4(32)


@fixed_helper
def plain_8(raw: Array, y: Array) -> None:
    """Unpack Q8_0: a scale, 32 signed bytes."""
    d = half(raw, 0)
    for i in range(32):
        y[i] = narrow(y, f4(np.int8(raw[2 + i])) * d)


@fixed_helper
def nibbles(raw: Array, y: Array, has_least: bool) -> None:
    """Unpack Q4_0 and Q4_1: a scale, a minimum if it has one, 16 bytes: low halves before high ones."""
    d, start = half(raw, 0), 2
    if has_least:
        least, start = half(raw, 2), 4
        for i in range(16):
            q = raw[start + i]
            y[i] = narrow(y, d * f4(q & 15) + least)
            y[i + 16] = narrow(y, d * f4(q >> 4) + least)
        return
    for i in range(16):
        q = raw[start + i]
        y[i] = narrow(y, d * f4(i4(q & 15) - i4(8)))
        y[i + 16] = narrow(y, d * f4(i4(q >> 4) - i4(8)))


@fixed_helper
def five_bits(raw: Array, y: Array, has_least: bool) -> None:
    """Unpack Q5_0 and Q5_1: as with four bits, and the fifth bits in four bytes before them."""
    d, start = half(raw, 0), 4 if has_least else 2
    least = half(raw, 2)
    for i in range(32):
        top = i4(raw[start + (i >> 3)] >> (i & 7)) & i4(1)
        q = i4(raw[start + 4 + (i & 15)] >> (4 * (i >> 4))) & i4(15) | i4(top << i4(4))
        if has_least:
            y[i] = narrow(y, d * f4(q) + least)
        else:
            y[i] = narrow(y, d * f4(q - i4(16)))


@fixed_helper
def two_bits(raw: Array, y: Array) -> None:
    """Unpack Q2_K: sixteen nibble pairs of scale and minimum, 64 bytes of bit pairs, their two factors."""
    d, least = half(raw, 80), half(raw, 82)
    for j in range(16):
        dl, ml = d * f4(raw[j] & 15), least * f4(raw[j] >> 4)
        first, shift = 16 + 32 * (j >> 3) + 16 * (j & 1), 2 * ((j >> 1) & 3)
        for i in range(16):
            y[16 * j + i] = narrow(y, dl * f4((raw[first + i] >> shift) & 3) - ml)


@fixed_helper
def three_bits(raw: Array, y: Array) -> None:
    """Unpack Q3_K: 32 bytes of third bits, 64 of pairs of bits, sixteen scales, their factor."""
    d = half(raw, 108)
    for j in range(16):
        dl = d * f4(scale_of_16(raw[96:108], j))
        first, shift = 32 + 32 * (j >> 3) + 16 * (j & 1), 2 * ((j >> 1) & 3)
        for i in range(16):
            low = i4(raw[first + i] >> shift) & i4(3)
            missing = (i4(raw[16 * (j & 1) + i] >> (j >> 1)) & i4(1)) ^ i4(1)
            y[16 * j + i] = narrow(y, dl * f4(low - i4(missing << i4(2))))


@fixed_helper
def scaled_bits(raw: Array, y: Array, has_fifth: bool) -> None:
    """Unpack Q4_K and Q5_K: two factors, eight scales and minima, fifth bits (32 bytes) if any, 128 bytes."""
    d, least = half(raw, 0), half(raw, 2)
    start = 48 if has_fifth else 16
    for j in range(8):
        scale, minimum = scale_and_least(raw[4:16], j)
        dl, ml = d * f4(scale), least * f4(minimum)
        first, shift = start + 32 * (j >> 1), 4 * (j & 1)
        for i in range(32):
            q = i4(raw[first + i] >> shift) & i4(15)
            if has_fifth:
                q |= i4((i4(raw[16 + i] >> j) & i4(1)) << i4(4))
            y[32 * j + i] = narrow(y, dl * f4(q) - ml)


@fixed_helper
def six_bits(raw: Array, y: Array) -> None:
    """Unpack Q6_K: 128 bytes of four bits, 64 of two, sixteen signed scales, their factor."""
    d = half(raw, 208)
    for j in range(16):
        dl = d * f4(np.int8(raw[192 + j]))
        for i in range(16):
            e = 16 * j + i
            half_block, place = e >> 7, e & 127
            low = i4(raw[64 * half_block + (place & 63)] >> (4 * (place >> 6))) & i4(15)
            high = i4(raw[128 + 32 * half_block + (place & 31)] >> (2 * (place >> 5))) & i4(3)
            y[e] = narrow(y, dl * f4((low | i4(high << i4(4))) - i4(32)))


@kernel("u1 e1+ i i i", liberties=False)
def unpack(raw: Array, out: Array, number: int, elements: int, nbytes: int) -> None:
    """Fill `out` from full blocks of the kind PACKED[number]."""
    for block in range(out.size // elements):
        x, y = raw[block * nbytes : (block + 1) * nbytes], out[block * elements : (block + 1) * elements]
        if number == Q8_0:
            plain_8(x, y)
        elif number in (Q4_0, Q4_1):
            nibbles(x, y, number == Q4_1)
        elif number in (Q5_0, Q5_1):
            five_bits(x, y, number == Q5_1)
        elif number == Q2_K:
            two_bits(x, y)
        elif number == Q3_K:
            three_bits(x, y)
        elif number in (Q4_K, Q5_K):
            scaled_bits(x, y, number == Q5_K)
        else:
            six_bits(x, y)


@implements(reference.dequantize)
def dequantize(raw: Array, kind: str, out: Array) -> None:
    if kind not in PACKED or not alike(out) or not out.flags.c_contiguous:
        reference.dequantize(raw, kind, out)
        return
    block, number, filled_out = BLOCK_KINDS[kind], PACKED.index(kind), bits(out)
    raw = np.ascontiguousarray(raw)

    def work(blocks: slice) -> None:
        here = slice(blocks.start * block.elements, blocks.stop * block.elements)
        unpack(raw[blocks.start * block.nbytes :], filled_out[here], number, block.elements, block.nbytes)

    in_parts((out.size // block.elements, block.elements), work)
