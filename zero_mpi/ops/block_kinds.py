"""Quantized types of GGUF in which a frozen tensor may be kept, with elements and bytes per block.

A block holds a few elements with their own scales. A tensor is a sequence of full blocks.
`gguf.quants.dequantize` defines the meaning of the bytes; `ops.cpu.dequantize` has kernels for `PACKED`.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from zero_mpi.device.types import Array

CHUNK = 1 << 18  # elements converted at a time, to bound temporary arrays; a multiple of every block size
PLAIN = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
PACKED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
RARE = (  # older versions of the package gguf lack some of these types
    *("IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"),
    *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
)


@dataclass(frozen=True)
class BlockKind:
    """Quantized type, with its name in GGUF and the numbers of elements and bytes of a block."""

    name: str
    elements: int
    nbytes: int

    def bytes_of(self, size: int) -> int:
        """Return the number of bytes of a tensor of `size` elements, a multiple of `elements`."""
        return size // self.elements * self.nbytes


BLOCK_KINDS = {
    name: BlockKind(name, *map(int, GGML_QUANT_SIZES[GGMLQuantizationType[name]]))
    for name in (*PLAIN, *PACKED, *RARE)
    if name in GGMLQuantizationType.__members__
}
SCALES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
SCALES |= {"Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2)}
"""Byte offsets of the float16 scales in a block of each `PACKED` kind. Finite scales give finite elements."""

EXPONENT = np.uint16(0x7C00)  # exponent bits of a float16; all are set in infinity and NaN


def finite_blocks(raw: Array, kind: str) -> Array:
    """Return a mask of blocks: True if all elements are finite. raw: the blocks; kind: one of `PACKED`."""
    blocks = np.ascontiguousarray(raw).reshape(-1, BLOCK_KINDS[kind].nbytes)
    scales = [blocks[:, offset : offset + 2].copy().view(np.uint16) & EXPONENT for offset in SCALES[kind]]
    return (np.hstack(scales) != EXPONENT).all(axis=1)
