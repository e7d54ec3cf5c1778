"""The `olmo2` architecture (Groeneveld et al., 2024): norms after attention and feed-forward, and of q, k.

The output of a branch is normalized before it is added, its input is not; q and k are over all heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

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
