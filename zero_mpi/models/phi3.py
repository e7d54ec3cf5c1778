"""The `phi3` architecture (Abdin et al., 2024): one matrix for q, k and v, and one for gate and up.

For long contexts it has two sets of divisors of its rotary frequencies (Ding et al., "LongRoPE", 2024): one
up to the context of its first training, one beyond. The model's context in the file selects the set, as
llama.cpp does by default, so neither a short text nor a cache changes the results.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from zero_mpi.device.types import Array
from zero_mpi.models.model_config import ModelKeys, Read
from zero_mpi.models.rope_scaling import ORIGINAL, read_factors
from zero_mpi.models.rotary import UNSUPPORTED_KEYS, RotaryModel
from zero_mpi.nn import JointQKV, JointSwiGLU, ProjectQKV, SwiGLU

MAGNITUDE = "rope.scaling.attn_factor"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


@dataclass(frozen=True)
class Phi3(RotaryModel):
    """Sizes of a phi3 model.

    long_factors, short_factors   divisors of rotary frequencies; empty: none
    original_context              longest context that uses short_factors; 0: the model's context
    rope_magnitude                factor by which rotated q and k are multiplied
    """

    arch: ClassVar[str] = "phi3"
    interleaved: ClassVar[bool] = False
    projected: ClassVar[type[ProjectQKV]] = JointQKV
    gated: ClassVar[type[SwiGLU]] = JointSwiGLU
    any_head_width: ClassVar[bool] = False
    possible_biases: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[tuple[str, ...]] = tuple(key for key in UNSUPPORTED_KEYS if key != MAGNITUDE)
    long_factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    original_context: int = 0
    rope_magnitude: float = 1.0

    @classmethod
    def own_fields(cls, keys: ModelKeys, tensors: Collection[str], read: Read | None) -> dict[str, Any]:
        width = cls.read_heads(keys, keys.size("embedding_length")).key_width
        count = keys.size("rope.dimension_count", width) // 2
        found = {"long_factors": LONG, "short_factors": SHORT}
        factors = {
            field: read_factors(tensors, read, count, name)
            for field, name in found.items()
            if name in tensors
        }
        context = keys.size("context_length")
        original = keys.size(ORIGINAL, context)
        return factors | {
            "original_context": 0 if original == context else original,
            "rope_magnitude": keys.number(MAGNITUDE, 1.0) or 1.0,
        }

    def metadata(self) -> dict[str, Any]:
        keys: dict[str, Any] = {}
        if self.original_context:
            keys[ORIGINAL] = np.uint32(self.original_context)
        if self.rope_magnitude != 1:
            keys[MAGNITUDE] = np.float32(self.rope_magnitude)
        return super().metadata() | {f"{self.arch}.{name}": value for name, value in keys.items()}

    def constants(self) -> dict[str, Array]:
        both = {LONG: self.long_factors, SHORT: self.short_factors}
        return {name: np.array(factors, np.float32) for name, factors in both.items() if factors}

    @property
    def divisors(self) -> tuple[float, ...]:
        reaches = self.original_context and self.context_length > self.original_context
        own = self.long_factors if reaches else self.short_factors
        scaled = super().divisors
        return tuple(a * b for a, b in zip(own, scaled, strict=True)) if own and scaled else own or scaled

    @property
    def magnitude(self) -> float:
        return super().magnitude * self.rope_magnitude
