"""The `llama` architecture and related architectures that differ from it only in settings.

llama: Touvron et al., 2023, with the frequency factors of Llama 3. In smollm3 (Bakouch et al., 2025), every
fourth block has no rotary positions (Yang et al., "RoPE to NoRoPE and Back Again", 2025). qwen2, qwen3 and
qwen3moe (Yang et al., 2024 and 2025) have the NEOX rotary order; Qwen2 has biases for q, k and v, and Qwen3
normalizes q and k per head. olmo2 and olmoe (Groeneveld et al., 2024; Muennighoff et al., 2024) normalize q
and k over all heads. In olmo2, outputs of attention and feed-forward are normalized instead of inputs. In
olmoe, the weights of the used experts do not sum to 1.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from zero_mpi.errors import UsageError
from zero_mpi.models.rotary import QKV_BIASES, UNSUPPORTED_KEYS, RotaryModel


@dataclass(frozen=True)
class Llama(RotaryModel):
    """Configuration of a llama model; a file may have a bias in each projection, or experts (Mixtral)."""

    arch: ClassVar[str] = "llama"
    interleaved: ClassVar[bool] = True
    takes_rope_factors: ClassVar[bool] = True
    may_have_experts: ClassVar[bool] = True
    possible_biases: ClassVar[frozenset[str]] = QKV_BIASES | {"attn_output", "ffn_gate", "ffn_up", "ffn_down"}


@dataclass(frozen=True)
class SmolLM3(RotaryModel):
    """Configuration of a smollm3 model."""

    arch: ClassVar[str] = "smollm3"
    interleaved: ClassVar[bool] = True
    rope_free_period: ClassVar[int] = 4
    rms_epsilon: float = float(np.float32(1e-6))


@dataclass(frozen=True)
class Qwen2(RotaryModel):
    """Configuration of a qwen2 model."""

    arch: ClassVar[str] = "qwen2"
    any_head_width: ClassVar[bool] = False
    rms_epsilon: float = float(np.float32(1e-6))
    biases: frozenset[str] = QKV_BIASES


@dataclass(frozen=True)
class Qwen3(RotaryModel):
    """Configuration of a qwen3 model."""

    arch: ClassVar[str] = "qwen3"
    head_norms: ClassVar[bool] = True
    rms_epsilon: float = float(np.float32(1e-6))


@dataclass(frozen=True)
class Qwen3MoE(Qwen3):
    """Configuration of a qwen3moe model; `feed_forward_length` is the width of an expert."""

    arch: ClassVar[str] = "qwen3moe"
    may_have_experts: ClassVar[bool] = True
    needs_experts: ClassVar[bool] = True
    expert_width: ClassVar[str] = "expert_feed_forward_length"


@dataclass(frozen=True)
class OLMo2(RotaryModel):
    """Configuration of an olmo2 model."""

    arch: ClassVar[str] = "olmo2"
    joint_norms: ClassVar[bool] = True
    norms_before: ClassVar[bool] = False
    norms_after: ClassVar[bool] = True
    may_tie: ClassVar[bool] = False
    any_head_width: ClassVar[bool] = False
    refusals: ClassVar[tuple[str, ...]] = (*UNSUPPORTED_KEYS, "attention.sliding_window")
    rms_epsilon: float = float(np.float32(1e-6))


@dataclass(frozen=True)
class OLMoE(RotaryModel):
    """Configuration of an olmoe model; each query head has its own key/value head."""

    arch: ClassVar[str] = "olmoe"
    joint_norms: ClassVar[bool] = True
    may_tie: ClassVar[bool] = False
    any_head_width: ClassVar[bool] = False
    may_have_experts: ClassVar[bool] = True
    needs_experts: ClassVar[bool] = True
    normalized: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.head_count_kv != self.head_count:
            flag = f"--kv-heads {self.head_count_kv} (the GGUF key olmoe.attention.head_count_kv)"
            raise UsageError(f"{flag}: olmoe has as many key/value heads as query heads, {self.head_count}")
