"""The `granite` and `granitemoe` architectures (IBM, 2024): a llama with four multipliers.

The multipliers come from muP (Yang et al., 2022). granitemoe is a mixture of experts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from zero_mpi.errors import UsageError
from zero_mpi.files.gguf_keys import MOST_SIZE
from zero_mpi.models.llama import Llama
from zero_mpi.models.model_config import ModelKeys, Read
from zero_mpi.models.rotary import UNSUPPORTED_KEYS
from zero_mpi.nn import Chain, Layer, Multiply, Residual, SwiGLU


@dataclass(frozen=True)
class Granite(Llama):
    """Sizes and multipliers of a granite model.

    embedding_scale  multiplies token embeddings; residual_scale: outputs of attention and feed-forward
    attention_scale  multiplies products of queries and keys; 0: 1 / sqrt(head width), as in llama
    logit_scale      divides the logits
    """

    arch: ClassVar[str] = "granite"
    refused: ClassVar[tuple[str, ...]] = tuple(key for key in UNSUPPORTED_KEYS if key != "attention.scale")
    may_have_experts: ClassVar[bool] = False
    embedding_scale: float = 12.0
    residual_scale: float = float(np.float32(0.22))
    attention_scale: float = 0.0
    logit_scale: float = 8.0

    @classmethod
    def from_flags(cls, sizes: Mapping[str, Any]) -> Self:
        found = super().from_flags(sizes)
        return replace(found, attention_scale=float(np.float32(1 / found.key_length)))

    @classmethod
    def own_fields(cls, keys: ModelKeys, tensors: Collection[str], read: Read | None) -> dict[str, Any]:
        if keys.keys.flag(f"{cls.arch}.rope.scaling.finetuned") is False:
            raise UsageError(f"the GGUF key {cls.arch}.rope.scaling.finetuned = False is not supported")
        return {
            name: keys.number(key, default if cls.needs_experts and name != "logit_scale" else None)
            or default
            for name, (key, default) in MULTIPLIERS.items()
        }

    def metadata(self) -> dict[str, Any]:
        own = {key: np.float32(getattr(self, name)) for name, (key, _) in MULTIPLIERS.items()}
        return super().metadata() | {f"{self.arch}.{key}": value for key, value in own.items()}

    @property
    def score_scale(self) -> float:
        return self.attention_scale or super().score_scale

    def embedding(self) -> Layer:
        return Chain(super().embedding(), Multiply(self.embedding_scale))

    def block(self, prefix: str) -> Layer:
        branches = self.attention(prefix), self.feed_forward(prefix)
        return Chain(*(Residual(Chain(branch, Multiply(self.residual_scale))) for branch in branches))

    def final_norm(self) -> Layer:
        return Chain(super().final_norm(), Multiply(1 / self.logit_scale))


@dataclass(frozen=True)
class GraniteMoE(Granite):
    """Sizes of a granitemoe model; a shared feed-forward of its own width, if any, sees every token."""

    arch: ClassVar[str] = "granitemoe"
    may_have_experts: ClassVar[bool] = True
    needs_experts: ClassVar[bool] = True
    expert_shared_feed_forward_length: int = 0

    @classmethod
    def own_fields(cls, keys: ModelKeys, tensors: Collection[str], read: Read | None) -> dict[str, Any]:
        shared = keys.keys.whole(f"{cls.arch}.{SHARED}", 0, MOST_SIZE) or 0
        return super().own_fields(keys, tensors, read) | {SHARED: shared}

    def metadata(self) -> dict[str, Any]:
        width = np.uint32(self.expert_shared_feed_forward_length)
        return super().metadata() | ({f"{self.arch}.{SHARED}": width} if width else {})

    def experts(self, prefix: str, shared: Layer | None = None) -> Layer:
        width, hidden = self.embedding_length, self.expert_shared_feed_forward_length
        if hidden:
            down = self.linear(prefix, "ffn_down_shexp", hidden, width)
            shared = Chain(SwiGLU(prefix, width, hidden, suffix="_shexp"), down)
        return super().experts(prefix, shared)


SHARED = "expert_shared_feed_forward_length"

# field -> (GGUF key, value if the key is 0, which llama.cpp treats as missing)
MULTIPLIERS = {
    "embedding_scale": ("embedding_scale", 1.0),
    "residual_scale": ("residual_scale", 1.0),
    "attention_scale": ("attention.scale", 0.0),
    "logit_scale": ("logit_scale", 1.0),
}
