"""The `gemma3` architecture (Gemma Team, 2025): five of six blocks attend to a window only.

Attention and feed-forward have a norm before and one after them, and q and k are normalized head by head.
The rotary frequencies of blocks with a window have their own base, which is never scaled.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from zero_mpi.files.gguf_keys import MOST_SIZE
from zero_mpi.models.model_config import ModelKeys, Read
from zero_mpi.models.rotary import UNSUPPORTED_KEYS, RotaryModel
from zero_mpi.nn import Chain, GeGLU, Layer, Multiply, RoPE
from zero_mpi.nn.activation import SwiGLU

PERIOD = 6  # blocks; the last block of each period has no window
LOCAL_BASE = 10000.0  # base of the rotary frequencies of blocks with a window
BLOCKS_27B = 62  # Gemma 3 27B scales scores by another width; llama.cpp also detects it by its blocks
WINDOW, PATTERN, BASE = (
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "rope.freq_base_swa",
)


@dataclass(frozen=True)
class Gemma3(RotaryModel):
    """Sizes of a gemma3 model; `sliding_window`: positions that a block with a window sees; 0: all."""

    arch: ClassVar[str] = "gemma3"
    interleaved: ClassVar[bool] = False
    head_norms: ClassVar[bool] = True
    norms_after: ClassVar[bool] = True
    gated: ClassVar[type[SwiGLU]] = GeGLU
    refused: ClassVar[tuple[str, ...]] = (
        *UNSUPPORTED_KEYS,
        "final_logit_softcapping",
        "attn_logit_softcapping",
    )
    rms_epsilon: float = float(np.float32(1e-6))
    rope_freq_base: float = 1e6
    sliding_window: int = 1024

    @classmethod
    def own_fields(cls, keys: ModelKeys, tensors: Collection[str], read: Read | None) -> dict[str, Any]:
        keys.require(PATTERN, PERIOD)
        keys.require(BASE, LOCAL_BASE)
        return {"sliding_window": keys.keys.whole(f"{cls.arch}.{WINDOW}", 0, MOST_SIZE) or 0}

    def metadata(self) -> dict[str, Any]:
        return super().metadata() | {f"{self.arch}.{WINDOW}": np.uint32(self.sliding_window)}

    @property
    def score_scale(self) -> float:
        if self.block_count == BLOCKS_27B:
            return float((self.embedding_length // self.head_count) ** -0.5)
        return super().score_scale

    def window(self, block: int) -> int | None:
        return self.sliding_window if self.sliding_window and (block + 1) % PERIOD else None

    def turn(self, block: int) -> list[Layer]:
        if self.window(block) is None:
            return super().turn(block)
        return [RoPE(LOCAL_BASE, interleaved=self.interleaved, in_place=True, width=self.turned_width)]

    def embedding(self) -> Layer:
        return Chain(super().embedding(), Multiply(float(np.float32(self.embedding_length) ** 0.5)))
