"""The `olmo2` and `olmoe` architectures (Groeneveld et al., 2024; Muennighoff et al., 2024).

Both normalize q and k over all heads. In olmo2 the output of a branch is normalized before it is added, its
input is not; olmoe is a mixture of experts whose weights do not sum to 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from zero_mpi.errors import UsageError
from zero_mpi.models.rotary import UNSUPPORTED_KEYS, RotaryModel


@dataclass(frozen=True)
class OLMo2(RotaryModel):
    """Sizes of an olmo2 model."""

    arch: ClassVar[str] = "olmo2"
    interleaved: ClassVar[bool] = False
    joint_norms: ClassVar[bool] = True
    norms_before: ClassVar[bool] = False
    norms_after: ClassVar[bool] = True
    may_tie: ClassVar[bool] = False
    any_head_width: ClassVar[bool] = False
    refused: ClassVar[tuple[str, ...]] = (*UNSUPPORTED_KEYS, "attention.sliding_window")
    rms_epsilon: float = float(np.float32(1e-6))


@dataclass(frozen=True)
class OLMoE(RotaryModel):
    """Sizes of an olmoe model; each query head has a key/value head."""

    arch: ClassVar[str] = "olmoe"
    interleaved: ClassVar[bool] = False
    joint_norms: ClassVar[bool] = True
    may_tie: ClassVar[bool] = False
    any_head_width: ClassVar[bool] = False
    may_have_experts: ClassVar[bool] = True
    needs_experts: ClassVar[bool] = True
    normalized: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.head_count_kv != self.head_count:
            found = f"--kv-heads {self.head_count_kv} (the GGUF key olmoe.attention.head_count_kv)"
            raise UsageError(f"{found}: olmoe has as many as heads, {self.head_count}")
