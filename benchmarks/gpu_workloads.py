"""The models whose speed is measured on a GPU, and tiny ones that show the scripts at work without one.

Beside `workloads.WORKLOADS`, which are small enough to be computed on the CPU as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workloads import WORKLOADS, Workload

PEAK = 989e12  # dense bf16 operations a second of an H100 or H200, by its data sheet


@dataclass(frozen=True)
class GPUWorkload(Workload):
    """Also the key/value heads of a model with fewer of them, and whether its head is the embedding."""

    kv_heads: int | None = None
    tied: bool = True

    @property
    def flags(self) -> dict[str, Any]:
        """As flags of zero_mpi.train."""
        return super().flags | {"kv_heads": self.kv_heads, "tied": self.tied}


LARGE = {
    "gpt2-124m": GPUWorkload("gpt2", 50257, 12, 768, 12, 3072, 1024, 32),
    "llama-1b": GPUWorkload("llama", 128256, 16, 2048, 32, 8192, 2048, 4, kv_heads=8),
}
TINY = {
    "tiny-gpt2": GPUWorkload("gpt2", 61, 1, 32, 2, 64, 8, 2),
    "tiny-llama": GPUWorkload("llama", 61, 1, 32, 2, 64, 8, 2, kv_heads=1, tied=False),
}
ALL: dict[str, Workload] = {**WORKLOADS, **LARGE, **TINY}


def flop_of_a_token(parameters: int, workload: Workload) -> float:
    """Operations of training on one token: 6 a parameter, and attention's products without the mask.

    As Chowdhery et al., "PaLM", 2022, appendix B counts them, and everybody who quotes a share of the peak.
    """
    return 6.0 * parameters + 12.0 * workload.layers * workload.width * workload.context
