"""Sizes of training workloads that several benchmarks share, for our models and those of other libraries.

The gradient is clipped to norm 1 before AdamW (rate 3e-4, betas 0.9 and 0.95, eps 1e-8, decay 0.1) runs.
Tokens are random; each rank cycles through BATCHES micro-batches. The batch is per rank (weak scaling).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LR, BETAS, EPS, DECAY, CLIP = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
BATCHES = 4  # number of different micro-batches that a rank uses in turn
PEAK = 989e12  # dense bf16 operations per second of an H100 or H200, from its data sheet


@dataclass(frozen=True)
class Workload:
    """Sizes of a model and of a rank's micro-batch."""

    arch: str  # "llama": RMSNorm, rotary, SwiGLU, untied head; "gpt2": LayerNorm, biases, GELU, tied head
    vocabulary: int
    layers: int
    width: int
    heads: int
    ffn: int
    context: int
    batch: int
    kv_heads: int | None = None  # None: as many as query heads
    tied: bool | None = None  # None: the architecture's default

    @property
    def tokens(self) -> int:
        """Number of tokens in a micro-batch."""
        return self.batch * self.context

    @property
    def matrix_elements(self) -> int:
        """Number of matrix elements that multiply each token."""
        feed_forward = (3 if self.arch == "llama" else 2) * self.width * self.ffn
        attention = 2 * self.width**2 * (1 + (self.kv_heads or self.heads) / self.heads)
        return self.layers * (int(attention) + feed_forward) + self.vocabulary * self.width

    @property
    def gemm_flop(self) -> int:
        """Floating-point operations of a micro-batch's matmuls with weights: forward, dx and dw."""
        return 6 * self.matrix_elements * self.tokens

    def flop_of_a_token(self, parameters: int) -> float:
        """Return the FLOP of training on one token: 6 per parameter, plus attention to all positions.

        Shares of the peak use this count, from Chowdhery et al., "PaLM", 2022, appendix B.
        """
        return 6.0 * parameters + 12.0 * self.layers * self.width * self.context

    @property
    def flags(self) -> dict[str, Any]:
        """Return the sizes as flags of zero_mpi.train."""
        chosen = {"kv_heads": self.kv_heads, "tied": self.tied}
        return {name: value for name, value in chosen.items() if value is not None} | {
            "layers": self.layers,
            "dim": self.width,
            "heads": self.heads,
            "ffn": self.ffn,
            "context": self.context,
            "vocab_size": self.vocabulary,
        }


WORKLOADS = {
    "W1": Workload("llama", 256, 6, 384, 6, 1024, 256, 8),
    "W2": Workload("gpt2", 50257, 12, 768, 12, 3072, 256, 2),
    "W3": Workload("gpt2", 256, 4, 128, 4, 512, 64, 4),
}
GPU_WORKLOADS = {  # more workloads, for a GPU; the tiny ones test the scripts without a GPU
    "gpt2-124m": Workload("gpt2", 50257, 12, 768, 12, 3072, 1024, 32, tied=True),
    "llama-1b": Workload("llama", 128256, 16, 2048, 32, 8192, 2048, 4, kv_heads=8, tied=True),
    "tiny-gpt2": Workload("gpt2", 61, 1, 32, 2, 64, 8, 2, tied=True),
    "tiny-llama": Workload("llama", 61, 1, 32, 2, 64, 8, 2, kv_heads=1, tied=False),
}
ALL = WORKLOADS | GPU_WORKLOADS
