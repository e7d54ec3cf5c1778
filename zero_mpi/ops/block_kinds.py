"""The types of GGUF that a frozen tensor may stay in: how many elements a block has, and how many bytes.

A block is a few elements with scales of their own, each tensor a run of whole blocks. What the bytes mean is
said by `gguf.quants.dequantize`; what computes it fast is `ops.cpu.dequantize`.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

PLAIN = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
PACKED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


@dataclass(frozen=True)
class BlockKind:
    """A type by its name in GGUF: elements of a block, and its bytes."""

    name: str
    elements: int
    nbytes: int

    def bytes_of(self, size: int) -> int:
        """Bytes of a tensor of `size` elements, a multiple of the block's."""
        return size // self.elements * self.nbytes


BLOCK_KINDS = {
    name: BlockKind(name, *map(int, GGML_QUANT_SIZES[GGMLQuantizationType[name]]))
    for name in (*PLAIN, *PACKED)
}
