"""The `granite` architecture (IBM, 2024): a llama with four multipliers, as in muP (Yang et al., 2022)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from zero_mpi.errors import UsageError
from zero_mpi.models.llama import Llama
from zero_mpi.models.model_config import ModelKeys, Read
from zero_mpi.models.rotary import UNSUPPORTED_KEYS
from zero_mpi.nn import Chain, Layer, Multiply, Residual


@dataclass(frozen=True)
class Granite(Llama):
    """Sizes and multipliers of a granite model.

    embedding_scale  multiplies token embeddings; residual_scale: outputs of attention and feed-forward
    attention_scale  multiplies products of queries and keys; 0: 1 / root of a head's width, as elsewhere
    logit_scale      divides the logits
    """

    arch: ClassVar[str] = "granite"
    refused: ClassVar[tuple[str, ...]] = tuple(key for key in UNSUPPORTED_KEYS if key != "attention.scale")
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
        return {name: keys.number(key) or default for name, (key, default) in MULTIPLIERS.items()}

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


# field -> its key, and the meaning of a key of 0, which llama.cpp treats as a missing key
MULTIPLIERS = {
    "embedding_scale": ("embedding_scale", 1.0),
    "residual_scale": ("residual_scale", 1.0),
    "attention_scale": ("attention.scale", 0.0),
    "logit_scale": ("logit_scale", 1.0),
}
