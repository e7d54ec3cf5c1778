"""The three training workloads that benchmarks share, as sizes, for our models and the peers'.

float32; AdamW (rate 3e-4, betas 0.9 and 0.95, eps 1e-8, decay 0.1) after clipping the global norm at 1;
random tokens, another micro-batch for each rank and step. The batch is per rank (weak scaling).
"""

from dataclasses import dataclass

LR, BETAS, EPS, DECAY, CLIP = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
BATCHES = 4  # different micro-batches of a rank, in turn


@dataclass(frozen=True)
class Workload:
    """Sizes of a model and of a rank's micro-batch."""

    arch: str  # "llama": RMSNorm, rotary, SwiGLU, head of its own; "gpt2": LayerNorm, biases, GELU, tied head
    vocabulary: int
    layers: int
    width: int
    heads: int
    ffn: int
    context: int
    batch: int

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.batch * self.context

    @property
    def matrix_elements(self) -> int:
        """Weights that every token is multiplied with."""
        feed_forward = (3 if self.arch == "llama" else 2) * self.width * self.ffn
        return self.layers * (4 * self.width**2 + feed_forward) + self.vocabulary * self.width

    @property
    def gemm_flop(self) -> int:
        """Floating-point operations of a micro-batch's products with weights: forward, dx and dw."""
        return 6 * self.matrix_elements * self.tokens

    @property
    def flags(self) -> dict[str, object]:
        """The same sizes as flags of zero_mpi.train."""
        return {
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
