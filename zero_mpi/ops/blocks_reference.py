"""The part of `reference` that unpacks blocks of GGUF, by the package gguf."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType
from gguf import dequantize as unpacked

from zero_mpi.device.types import Array
from zero_mpi.ops.block_kinds import BLOCK_KINDS, PLAIN

PIECE = 1 << 18  # elements unpacked at a time, a multiple of every block: temporaries stay small


def dequantize(raw: Array, kind: str, out: Array) -> None:
    """Fill out (n,) with the elements of full blocks raw (bytes,), rounded once if `out` is of a low type.

    kind: a name of `BLOCK_KINDS`.
    """
    raw, block = np.ascontiguousarray(raw), BLOCK_KINDS[kind]
    with np.errstate(all="ignore"):  # values that are not finite are refused when a file is read
        if kind in PLAIN:
            out[...] = raw.view(PLAIN[kind])
            return
        for start in range(0, out.size, PIECE):
            piece = raw[block.bytes_of(start) : block.bytes_of(start + PIECE)]
            out[start : start + PIECE] = unpacked(piece, GGMLQuantizationType[kind])
