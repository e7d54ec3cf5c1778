"""The `llama` architecture: RMSNorm, rotary positions, grouped attention, SwiGLU (Touvron et al., 2023).

Rows of q and k are in llama.cpp's interleaved rotary order. Biases are optional and are there if a file
has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from zero_mpi.errors import UsageError
from zero_mpi.models.base import (
    HEAD_STD,
    Keys,
    Metadata,
    ModelConfig,
    common_sizes,
    head_stages,
    require_divides,
    vocabulary,
)
from zero_mpi.nn import (
    CausalAttention,
    Chain,
    Embedding,
    Heads,
    Layer,
    Linear,
    MergeHeads,
    ProjectQKV,
    Residual,
    RMSNorm,
    RoPE,
    Stage,
    SwiGLU,
)

UNSUPPORTED_KEYS = (
    "expert_count",
    "rope.scaling.type",
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "attention.scale",
    "attention.clamp_kqv",
)


@dataclass(frozen=True)
class Llama(ModelConfig):
    """Sizes of a llama model; `biases` names the projections that have one ("attn_q", "ffn_up", ...)."""

    arch: ClassVar[str] = "llama"
    head_count_kv: int
    key_length: int
    value_length: int
    rms_epsilon: float = float(np.float32(1e-5))
    rope_freq_base: float = 10000.0
    biases: frozenset[str] = frozenset()

    @classmethod
    def from_flags(cls, sizes: Mapping[str, Any]) -> Self:
        common = common_sizes(sizes)
        dim, heads = sizes["dim"], sizes["heads"]
        kv_heads = heads if sizes.get("kv_heads") is None else sizes["kv_heads"]
        require_divides(
            heads,
            kv_heads,
            f"--kv-heads {kv_heads} does not divide --heads {heads}",
            "each key/value head serves the same number of query heads",
        )
        require_divides(
            dim // heads,
            2,
            f"--dim {dim} / --heads {heads} = {dim // heads} is odd",
            "rotary positions turn pairs of columns, so the width of a head must be even",
        )
        return cls(
            **common,
            tied=bool(sizes.get("tied")),
            head_count_kv=kv_heads,
            feed_forward_length=sizes.get("ffn") or -(-8 * dim // 3 // 32) * 32,
            key_length=dim // heads,
            value_length=dim // heads,
        )

    @classmethod
    def from_gguf(cls, metadata: Metadata, tensors: Iterable[str]) -> Self:
        keys, names = Keys(cls.arch, metadata), set(tensors)
        keys.refuse_non_causal()
        keys.refuse(UNSUPPORTED_KEYS)
        width, heads = keys.size("embedding_length"), keys.size("attention.head_count")
        kv_heads = keys.size("attention.head_count_kv", heads)
        if heads % kv_heads:
            raise UsageError(
                f"the GGUF keys say {heads} heads over {kv_heads} key/value heads, which do not divide them"
            )
        key_length = keys.size("attention.key_length", width // heads)
        if keys.size("rope.dimension_count", key_length) != key_length or key_length % 2:
            raise UsageError(
                f"the GGUF key llama.rope.dimension_count must be the even head width {key_length}"
            )
        return cls(
            vocab_size=vocabulary(metadata, keys),
            context_length=keys.size("context_length"),
            embedding_length=width,
            block_count=keys.blocks(names),
            feed_forward_length=keys.size("feed_forward_length"),
            head_count=heads,
            head_count_kv=kv_heads,
            key_length=key_length,
            value_length=keys.size("attention.value_length", width // heads),
            rms_epsilon=keys.number("attention.layer_norm_rms_epsilon"),
            rope_freq_base=keys.number("rope.freq_base", 10000.0, least=1.0),
            tied="output.weight" not in names,
            biases=frozenset(n.split(".")[2] for n in names if n.startswith("blk.0.") and n.endswith("bias")),
        )

    def metadata(self) -> dict[str, Any]:
        keys = {
            "attention.head_count_kv": np.uint32(self.head_count_kv),
            "attention.layer_norm_rms_epsilon": np.float32(self.rms_epsilon),
            "attention.key_length": np.uint32(self.key_length),
            "attention.value_length": np.uint32(self.value_length),
            "rope.dimension_count": np.uint32(self.key_length),
            "rope.freq_base": np.float32(self.rope_freq_base),
        }
        return super().metadata() | {f"{self.arch}.{name}": value for name, value in keys.items()}

    @property
    def heads(self) -> Heads:
        """The attention heads."""
        return Heads(self.head_count, self.head_count_kv, self.key_length, self.value_length)

    def linear(self, prefix: str, name: str, inputs: int, outputs: int) -> Linear:
        """A projection back into the residual stream: its start is scaled by the depth, as in GPT-2."""
        std = HEAD_STD / (2 * self.block_count) ** 0.5
        return Linear(f"{prefix}.{name}", inputs, outputs, bias=name in self.biases, std=std)

    def norm(self, name: str) -> RMSNorm:
        """An RMSNorm over the residual stream."""
        return RMSNorm(name, self.embedding_length, self.rms_epsilon)

    def attention(self, prefix: str) -> Layer:
        """x -> attention(norm(x))."""
        width, heads = self.embedding_length, self.heads
        return Chain(
            self.norm(f"{prefix}.attn_norm"),
            ProjectQKV(prefix, width, heads, bias="attn_q" in self.biases),
            RoPE(self.rope_freq_base, interleaved=True),
            CausalAttention(self.key_length**-0.5),
            MergeHeads(),
            self.linear(prefix, "attn_output", heads.query * heads.value_width, width),
        )

    def feed_forward(self, prefix: str) -> Layer:
        """x -> down(silu(gate(norm(x))) * up(norm(x)))."""
        width, hidden = self.embedding_length, self.feed_forward_length
        return Chain(
            self.norm(f"{prefix}.ffn_norm"),
            SwiGLU(prefix, width, hidden, bias="ffn_gate" in self.biases),
            self.linear(prefix, "ffn_down", hidden, width),
        )

    def layers(self) -> list[Stage]:
        width, vocabulary_size = self.embedding_length, self.vocab_size
        stages = [Stage("token_embd", Embedding("token_embd", vocabulary_size, width))]
        for prefix in (f"blk.{index}" for index in range(self.block_count)):
            block = Chain(Residual(self.attention(prefix)), Residual(self.feed_forward(prefix)))
            stages.append(Stage(prefix, block))
        return [*stages, *head_stages(self.norm("output_norm"), width, vocabulary_size, self.tied)]
