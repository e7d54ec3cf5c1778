"""The `gpt2` architecture: LayerNorm, learned positions, one qkv matrix, GELU (Radford et al., 2019)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from zero_mpi.errors import UsageError
from zero_mpi.models.model_config import (
    HEAD_STD,
    Metadata,
    ModelConfig,
    ModelKeys,
    Read,
    check_sizes,
    common_sizes,
    head_stages,
    sizes_in,
)
from zero_mpi.nn import (
    GELU,
    CausalAttention,
    Chain,
    Embedding,
    FusedQKV,
    Heads,
    Layer,
    LayerNorm,
    LearnedPositions,
    Linear,
    MergeHeads,
    Residual,
    Stage,
)


@dataclass(frozen=True)
class GPT2(ModelConfig):
    """Sizes of a gpt2 model."""

    arch: ClassVar[str] = "gpt2"
    norm_epsilon: float = float(np.float32(1e-5))

    @classmethod
    def from_flags(cls, sizes: Mapping[str, Any]) -> Self:
        sizes = check_sizes(sizes)
        common = common_sizes(sizes)
        kv_heads = sizes.get("kv_heads")
        if kv_heads not in (None, common["head_count"]):
            raise UsageError(
                f"--kv-heads {kv_heads}: gpt2 has as many key/value heads as --heads "
                f"({common['head_count']}); leave the flag out or use --arch llama"
            )
        tied = sizes.get("tied")
        return cls(
            **common,
            **cls.experts_from_flags(sizes),
            tied=True if tied is None else bool(tied),
            feed_forward_length=sizes.get("ffn") or 4 * sizes["dim"],
        )

    @classmethod
    def from_gguf(cls, metadata: Metadata, tensors: Iterable[str], read: Read | None = None) -> Self:
        keys = ModelKeys(cls.arch, metadata)
        tensors = set(tensors)
        keys.refuse_non_causal()
        width, heads = keys.size("embedding_length"), keys.size("attention.head_count")
        if width % heads:
            raise UsageError(
                f"the GGUF key {cls.arch}.attention.head_count = {heads} does not divide {width}"
            )
        return cls(
            **sizes_in(metadata, keys, tensors),
            feed_forward_length=keys.size("feed_forward_length"),
            head_count=heads,
            norm_epsilon=keys.number("attention.layer_norm_epsilon"),
        )

    def metadata(self) -> dict[str, Any]:
        epsilon = {f"{self.arch}.attention.layer_norm_epsilon": np.float32(self.norm_epsilon)}
        return super().metadata() | epsilon

    def block(self, prefix: str) -> Layer:
        """Return the layer x + attention(norm(x)), then x + mlp(norm(x))."""
        width, hidden, eps = self.embedding_length, self.feed_forward_length, self.norm_epsilon
        head = width // self.head_count
        std = HEAD_STD / (2 * self.block_count) ** 0.5
        attention = Chain(
            LayerNorm(f"{prefix}.attn_norm", width, eps),
            FusedQKV(prefix, width, Heads(self.head_count, self.head_count, head, head), bias=True),
            CausalAttention(head**-0.5),
            MergeHeads(),
            Linear(f"{prefix}.attn_output", width, width, bias=True, std=std),
        )
        mlp = Chain(
            LayerNorm(f"{prefix}.ffn_norm", width, eps),
            Linear(f"{prefix}.ffn_up", width, hidden, bias=True),
            GELU(),
            Linear(f"{prefix}.ffn_down", hidden, width, bias=True, std=std),
        )
        return Chain(Residual(attention), Residual(mlp))

    def layers(self) -> list[Stage]:
        width = self.embedding_length
        positions = LearnedPositions("position_embd", self.context_length, width)
        norm = LayerNorm("output_norm", width, self.norm_epsilon)
        return [
            Stage("token_embd", Embedding("token_embd", self.vocab_size, width)),
            Stage("position_embd", positions),
            *(Stage(f"blk.{i}", self.block(f"blk.{i}")) for i in range(self.block_count)),
            *head_stages(norm, width, self.vocab_size, self.tied),
        ]
