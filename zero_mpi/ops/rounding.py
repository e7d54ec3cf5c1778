"""Rounding to the values of a quantized type, so that training uses the same weights as the exported file."""

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from zero_mpi import ops
from zero_mpi.device.types import Array
from zero_mpi.ops import ggml
from zero_mpi.ops.block_kinds import BLOCK_KINDS, CHUNK, PLAIN


def round_to(kind: str, values: Array, out: Array) -> None:
    """Fill out (n,) with float32 `values` after quantization to a type and back."""
    if kind in PLAIN:
        out[...] = values.astype(PLAIN[kind])
        return
    block, type = BLOCK_KINDS[kind].elements, GGMLQuantizationType[kind]
    make = quantize if ggml.reader(kind) is None else ggml.quantize  # both quantizers return the same bytes
    for start in range(0, values.size, CHUNK):
        rows = np.asarray(values[start : start + CHUNK]).reshape(-1, block)
        ops.dequantize(make(rows, type).reshape(-1), kind, out[start : start + CHUNK])
