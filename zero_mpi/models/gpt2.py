"""The `gpt2` architecture: LayerNorm, learned positions, one qkv matrix, GELU (Radford et al., 2019)."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from zero_mpi import nn
from zero_mpi.errors import UsageError
from zero_mpi.models.model_config import ModelConfig, ModelKeys, Read


@dataclass(frozen=True)
class GPT2(ModelConfig):
    """Configuration of a gpt2 model."""

    arch: ClassVar[str] = "gpt2"
    norm_epsilon: float = float(np.float32(1e-5))

    @classmethod
    def flag_fields(cls, sizes: Mapping[str, Any]) -> dict[str, Any]:
        kv_heads, heads, tied = sizes["kv_heads"], sizes["heads"], sizes["tied"]
        if kv_heads not in (None, heads):
            raise UsageError(
                f"--kv-heads {kv_heads}: gpt2 has as many key/value heads as --heads ({heads}); leave the "
                "flag out or use --arch llama"
            )
        width = sizes["ffn"] or 4 * sizes["dim"]
        return {"tied": True if tied is None else bool(tied), "feed_forward_length": width}

    @classmethod
    def file_fields(cls, keys: ModelKeys, tensors: Collection[str], read: Read | None) -> dict[str, Any]:
        width, heads = keys.size("embedding_length"), keys.size("attention.head_count")
        if width % heads:
            raise UsageError(
                f"the GGUF key {cls.arch}.attention.head_count = {heads} does not divide the width {width}"
            )
        return {
            "feed_forward_length": keys.size("feed_forward_length"),
            "head_count": heads,
            "norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        }

    def values_by_key(self) -> dict[str, Any]:
        return super().values_by_key() | {"attention.layer_norm_epsilon": np.float32(self.norm_epsilon)}

    def block(self, prefix: str) -> nn.Layer:
        width, hidden, eps = self.embedding_length, self.feed_forward_length, self.norm_epsilon
        head, std = width // self.head_count, self.residual_std
        attention = nn.Chain(
            nn.LayerNorm(f"{prefix}.attn_norm", width, eps),
            nn.FusedQKV(prefix, width, nn.Heads(self.head_count, self.head_count, head, head), bias=True),
            nn.CausalAttention(head**-0.5),
            nn.MergeHeads(),
            nn.Linear(f"{prefix}.attn_output", width, width, bias=True, std=std),
        )
        mlp = nn.Chain(
            nn.LayerNorm(f"{prefix}.ffn_norm", width, eps),
            nn.Linear(f"{prefix}.ffn_up", width, hidden, bias=True),
            nn.GELU(),
            nn.Linear(f"{prefix}.ffn_down", hidden, width, bias=True, std=std),
        )
        return nn.Chain(nn.Residual(attention), nn.Residual(mlp))

    def layers(self) -> list[nn.Stage]:
        width = self.embedding_length
        return [
            nn.Stage("token_embd", nn.Embedding("token_embd", self.vocab_size, width)),
            nn.Stage("position_embd", nn.LearnedPositions("position_embd", self.context_length, width)),
            *(nn.Stage(f"blk.{i}", self.block(f"blk.{i}")) for i in range(self.block_count)),
            *self.head(nn.LayerNorm("output_norm", width, self.norm_epsilon)),
        ]
