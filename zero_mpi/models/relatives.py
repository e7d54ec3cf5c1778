"""Architectures related to llama that have additional keys and layers: granite, phi3 and gemma3.

granite and granitemoe (IBM, 2024) have four multipliers, as in muP (Yang et al., 2022).

phi3 (Abdin et al., 2024) has one matrix for q, k and v, and one for gate and up. For long contexts it has two
sets of divisors of its rotary frequencies (Ding et al., "LongRoPE", 2024): one for contexts up to the
original length, the other for longer contexts. The context length in the file selects the set, as llama.cpp
does by default, so neither a short text nor a cache changes the results.

In gemma3 (Gemma Team, 2025), five of six blocks attend only to a window. Attention and feed-forward have one
norm before and one after them, and q and k are normalized per head. The rotary frequencies of blocks with a
window have a separate base, which is never scaled.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from zero_mpi import nn
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError
from zero_mpi.files.gguf_keys import MOST_SIZE
from zero_mpi.models.llama import Llama
from zero_mpi.models.model_config import ModelKeys, Read
from zero_mpi.models.rotary import ORIGINAL, UNSUPPORTED_KEYS, RotaryModel, read_factors

SHARED = "expert_shared_feed_forward_length"
MULTIPLIERS = {  # field -> (GGUF key, value if the key is 0, because llama.cpp ignores a 0)
    "embedding_scale": ("embedding_scale", 1.0),
    "residual_scale": ("residual_scale", 1.0),
    "attention_scale": ("attention.scale", 0.0),
    "logit_scale": ("logit_scale", 1.0),
}


@dataclass(frozen=True)
class Granite(Llama):
    """Configuration of a granite model, with its multipliers."""

    arch: ClassVar[str] = "granite"
    refusals: ClassVar[tuple[str, ...]] = tuple(key for key in UNSUPPORTED_KEYS if key != "attention.scale")
    may_have_experts: ClassVar[bool] = False
    embedding_scale: float = 12.0  # multiplies token embeddings
    residual_scale: float = float(np.float32(0.22))  # multiplies outputs of attention and feed-forward
    attention_scale: float = 0.0  # multiplies products of q and k; 0: 1 / sqrt(head width), as in llama
    logit_scale: float = 8.0  # divides the logits

    @classmethod
    def flag_fields(cls, sizes: Mapping[str, Any]) -> dict[str, Any]:
        fields = super().flag_fields(sizes)
        return fields | {"attention_scale": float(np.float32(1 / fields["key_length"]))}

    @classmethod
    def file_fields(cls, keys: ModelKeys, tensors: Collection[str], read: Read | None) -> dict[str, Any]:
        if keys.keys.flag(f"{cls.arch}.rope.scaling.finetuned") is False:
            raise UsageError(f"the GGUF key {cls.arch}.rope.scaling.finetuned = False is not supported")
        return super().file_fields(keys, tensors, read) | {
            name: keys.number(key, default if cls.needs_experts and name != "logit_scale" else None)
            or default
            for name, (key, default) in MULTIPLIERS.items()
        }

    def values_by_key(self) -> dict[str, Any]:
        multipliers = {key: np.float32(getattr(self, name)) for name, (key, _) in MULTIPLIERS.items()}
        return super().values_by_key() | multipliers

    @property
    def score_scale(self) -> float:
        return self.attention_scale or super().score_scale

    def embedding(self) -> nn.Layer:
        return nn.Chain(super().embedding(), nn.Multiply(self.embedding_scale))

    def block(self, prefix: str) -> nn.Layer:
        branches = self.attention(prefix), self.feed_forward(prefix)
        return nn.Chain(*(nn.Residual(nn.Chain(b, nn.Multiply(self.residual_scale))) for b in branches))

    def final_norm(self) -> nn.Layer:
        return nn.Chain(super().final_norm(), nn.Multiply(1 / self.logit_scale))


@dataclass(frozen=True)
class GraniteMoE(Granite):
    """Configuration of a granitemoe model, which may have a shared feed-forward for all tokens."""

    arch: ClassVar[str] = "granitemoe"
    may_have_experts: ClassVar[bool] = True
    needs_experts: ClassVar[bool] = True
    expert_shared_feed_forward_length: int = 0

    @classmethod
    def file_fields(cls, keys: ModelKeys, tensors: Collection[str], read: Read | None) -> dict[str, Any]:
        shared = keys.keys.integer(f"{cls.arch}.{SHARED}", 0, MOST_SIZE) or 0
        return super().file_fields(keys, tensors, read) | {SHARED: shared}

    def values_by_key(self) -> dict[str, Any]:
        width = np.uint32(self.expert_shared_feed_forward_length)
        return super().values_by_key() | ({SHARED: width} if width else {})

    def experts(self, prefix: str, shared: nn.Layer | None = None) -> nn.Layer:
        width, hidden = self.embedding_length, self.expert_shared_feed_forward_length
        if hidden:
            down = self.linear(prefix, "ffn_down_shexp", hidden, width)
            shared = nn.Chain(nn.SwiGLU(prefix, width, hidden, suffix="_shexp"), down)
        return super().experts(prefix, shared)


MAGNITUDE = "rope.scaling.attn_factor"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


@dataclass(frozen=True)
class Phi3(RotaryModel):
    """Configuration of a phi3 model."""

    arch: ClassVar[str] = "phi3"
    projection: ClassVar[type[nn.ProjectQKV]] = nn.JointQKV
    activation: ClassVar[type[nn.SwiGLU]] = nn.JointSwiGLU
    any_head_width: ClassVar[bool] = False
    possible_biases: ClassVar[frozenset[str]] = frozenset()
    refusals: ClassVar[tuple[str, ...]] = tuple(key for key in UNSUPPORTED_KEYS if key != MAGNITUDE)
    long_factors: tuple[float, ...] = ()  # divisors of rotary frequencies; empty: none
    short_factors: tuple[float, ...] = ()
    original_context: int = 0  # longest context that uses short_factors; 0: the model's context
    rope_magnitude: float = 1.0  # factor by which rotated q and k are multiplied

    @classmethod
    def file_fields(cls, keys: ModelKeys, tensors: Collection[str], read: Read | None) -> dict[str, Any]:
        width = cls.read_heads(keys, keys.size("embedding_length")).key_width
        count = keys.size("rope.dimension_count", width) // 2
        names = {"long_factors": LONG, "short_factors": SHORT}
        present = {field: name for field, name in names.items() if name in tensors}
        factors = {field: read_factors(tensors, read, count, name) for field, name in present.items()}
        context = keys.size("context_length")
        original = keys.size(ORIGINAL, context)
        fields = super().file_fields(keys, tensors, read) | factors
        fields["original_context"] = 0 if original == context else original
        fields["rope_magnitude"] = keys.number(MAGNITUDE, 1.0) or 1.0
        return fields

    def values_by_key(self) -> dict[str, Any]:
        keys: dict[str, Any] = {}
        if self.original_context:
            keys[ORIGINAL] = np.uint32(self.original_context)
        if self.rope_magnitude != 1:
            keys[MAGNITUDE] = np.float32(self.rope_magnitude)
        return super().values_by_key() | keys

    def constants(self) -> dict[str, Array]:
        tensors = {LONG: self.long_factors, SHORT: self.short_factors}
        return {name: np.array(factors, np.float32) for name, factors in tensors.items() if factors}

    @property
    def divisors(self) -> tuple[float, ...]:
        is_long = self.original_context and self.context_length > self.original_context
        base = self.long_factors if is_long else self.short_factors
        scaled = super().divisors
        return tuple(a * b for a, b in zip(base, scaled, strict=True)) if base and scaled else base or scaled

    @property
    def magnitude(self) -> float:
        return super().magnitude * self.rope_magnitude


PERIOD = 6  # blocks; the last block of each period has no window
LOCAL_BASE = 10000.0  # base of the rotary frequencies of blocks with a window
BLOCKS_27B = 62  # blocks of Gemma 3 27B, which scales scores by (model width / heads)^-0.5
WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
BASE = "rope.freq_base_swa"
SOFTCAPS = ("final_logit_softcapping", "attn_logit_softcapping")


@dataclass(frozen=True)
class Gemma3(RotaryModel):
    """Configuration of a gemma3 model; `sliding_window`: number of positions in a window; 0: no windows."""

    arch: ClassVar[str] = "gemma3"
    head_norms: ClassVar[bool] = True
    norms_after: ClassVar[bool] = True
    activation: ClassVar[type[nn.SwiGLU]] = nn.GeGLU
    refusals: ClassVar[tuple[str, ...]] = (*UNSUPPORTED_KEYS, *SOFTCAPS)
    rms_epsilon: float = float(np.float32(1e-6))
    rope_freq_base: float = 1e6
    sliding_window: int = 1024

    @classmethod
    def file_fields(cls, keys: ModelKeys, tensors: Collection[str], read: Read | None) -> dict[str, Any]:
        keys.require(PATTERN, PERIOD)
        keys.require(BASE, LOCAL_BASE)
        window = keys.keys.integer(f"{cls.arch}.{WINDOW}", 0, MOST_SIZE) or 0
        return super().file_fields(keys, tensors, read) | {"sliding_window": window}

    def values_by_key(self) -> dict[str, Any]:
        return super().values_by_key() | {WINDOW: np.uint32(self.sliding_window)}

    @property
    def score_scale(self) -> float:
        if self.block_count == BLOCKS_27B:
            return float((self.embedding_length // self.head_count) ** -0.5)
        return super().score_scale

    def window(self, block: int) -> int | None:
        return self.sliding_window if self.sliding_window and (block + 1) % PERIOD else None

    def turn(self, block: int) -> list[nn.Layer]:
        if self.window(block) is None:
            return super().turn(block)
        return [nn.RoPE(LOCAL_BASE, interleaved=self.interleaved, width=self.rotary_width)]

    def embedding(self) -> nn.Layer:
        return nn.Chain(super().embedding(), nn.Multiply(float(np.float32(self.embedding_length) ** 0.5)))
