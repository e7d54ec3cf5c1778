"""The `llama` architecture (Touvron et al., 2023), with the frequency factors of Llama 3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zero_mpi.models.rotary import QKV_BIASES, RotaryModel


@dataclass(frozen=True)
class Llama(RotaryModel):
    """Sizes of a llama model; a file may have a bias at each projection, or experts (Mixtral)."""

    arch: ClassVar[str] = "llama"
    interleaved: ClassVar[bool] = True
    takes_rope_factors: ClassVar[bool] = True
    may_have_experts: ClassVar[bool] = True
    possible_biases: ClassVar[frozenset[str]] = QKV_BIASES | {"attn_output", "ffn_gate", "ffn_up", "ffn_down"}
