"""The `smollm3` architecture (Bakouch et al., 2025): llama, but every fourth block has no rotary positions.

Yang et al., "RoPE to NoRoPE and Back Again", 2025: such blocks attend far back, the others near.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from zero_mpi.models.rotary import RotaryModel


@dataclass(frozen=True)
class SmolLM3(RotaryModel):
    """Sizes of a smollm3 model."""

    arch: ClassVar[str] = "smollm3"
    interleaved: ClassVar[bool] = True
    unturned: ClassVar[int] = 4
    rms_epsilon: float = float(np.float32(1e-6))
