"""The `qwen2`, `qwen3` and `qwen3moe` architectures (Yang et al., 2024 and 2025).

They are llama with the other rotary order. Qwen2 has biases at q, k and v; Qwen3 normalizes q and k instead,
head by head; qwen3moe is a Qwen3 with experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from zero_mpi.models.rotary import QKV_BIASES, RotaryModel


@dataclass(frozen=True)
class Qwen2(RotaryModel):
    """Sizes of a qwen2 model."""

    arch: ClassVar[str] = "qwen2"
    interleaved: ClassVar[bool] = False
    any_head_width: ClassVar[bool] = False
    rms_epsilon: float = float(np.float32(1e-6))
    biases: frozenset[str] = QKV_BIASES


@dataclass(frozen=True)
class Qwen3(RotaryModel):
    """Sizes of a qwen3 model."""

    arch: ClassVar[str] = "qwen3"
    interleaved: ClassVar[bool] = False
    head_norms: ClassVar[bool] = True
    rms_epsilon: float = float(np.float32(1e-6))


@dataclass(frozen=True)
class Qwen3MoE(Qwen3):
    """Sizes of a qwen3moe model; `feed_forward_length` is the width of an expert."""

    arch: ClassVar[str] = "qwen3moe"
    may_have_experts: ClassVar[bool] = True
    needs_experts: ClassVar[bool] = True
    expert_width: ClassVar[str] = "expert_feed_forward_length"
