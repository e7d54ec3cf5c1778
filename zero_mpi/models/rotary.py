"""What llama, qwen2 and qwen3 share: RMSNorm, rotary positions, grouped attention, SwiGLU.

The architectures differ in data: the rotary order of the rows of q and k, a norm of q and k, biases, and what
llama.cpp takes from a file. A file decides which of the possible biases a model has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from zero_mpi.device.types import Array
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
    QKNorm,
    Residual,
    RMSNorm,
    RoPE,
    Stage,
    SwiGLU,
)

# `attention.sliding_window` is none of these: files of qwen2 carry it though their models attend to all
# positions (`use_sliding_window` is off), and llama.cpp reads it for none of these architectures.
UNSUPPORTED_KEYS = (
    "expert_count",
    "rope.scaling.type",
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "attention.scale",
    "attention.clamp_kqv",
)
QKV_BIASES = frozenset({"attn_q", "attn_k", "attn_v"})
ROPE_FREQS = "rope_freqs.weight"


@dataclass(frozen=True)
class RotaryModel(ModelConfig):
    """Sizes of such a model; `biases` names the projections that have one ("attn_q", "ffn_up", ...).

    `rope_factors` (D / 2 of them, or none) divide the rotary frequencies; each is a float32.
    """

    interleaved: ClassVar[bool]
    """Rotary order of the rows of q and k: neighbours are a pair (llama.cpp's NORM), or halves (NEOX)."""
    head_norms: ClassVar[bool] = False
    """Whether q and k are normalized over the width of a head."""
    any_head_width: ClassVar[bool] = True
    """Whether llama.cpp opens a file whose heads together are not as wide as the model."""
    possible_biases: ClassVar[frozenset[str]] = QKV_BIASES
    """Projections that may have a bias in llama.cpp."""
    takes_rope_factors: ClassVar[bool] = False
    """Whether llama.cpp reads `rope_freqs.weight`; it refuses a file with a tensor that it does not read."""
    head_count_kv: int
    key_length: int
    value_length: int
    rms_epsilon: float = float(np.float32(1e-5))
    rope_freq_base: float = 10000.0
    biases: frozenset[str] = frozenset()
    rope_factors: tuple[float, ...] = ()

    @classmethod
    def from_flags(cls, sizes: Mapping[str, Any]) -> Self:
        sizes = check_sizes(sizes)
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
    def from_gguf(cls, metadata: Metadata, tensors: Iterable[str], read: Read | None = None) -> Self:
        tensors = tensors if isinstance(tensors, Mapping) else set(tensors)
        keys = ModelKeys(cls.arch, metadata)
        keys.refuse_non_causal()
        keys.refuse(UNSUPPORTED_KEYS)
        heads = cls.read_heads(keys, keys.size("embedding_length"))
        factors = cls.takes_rope_factors and ROPE_FREQS in tensors
        return cls(
            vocab_size=vocabulary(metadata, keys),
            context_length=keys.size("context_length"),
            embedding_length=keys.size("embedding_length"),
            block_count=keys.blocks(tensors),
            feed_forward_length=keys.size("feed_forward_length"),
            head_count=heads.query,
            head_count_kv=heads.kv,
            key_length=heads.key_width,
            value_length=heads.value_width,
            rms_epsilon=keys.number("attention.layer_norm_rms_epsilon"),
            rope_freq_base=keys.number("rope.freq_base", 10000.0, least=1.0),
            tied="output.weight" not in tensors,
            biases=frozenset(name for name in cls.possible_biases if f"blk.0.{name}.bias" in tensors),
            rope_factors=read_factors(tensors, read, heads.key_width // 2) if factors else (),
        )

    @classmethod
    def read_heads(cls, keys: ModelKeys, width: int) -> Heads:
        """The attention heads that a file's keys describe; raises UsageError if they do not fit together."""
        query = keys.size("attention.head_count")
        kv = keys.size("attention.head_count_kv", query)
        if query % kv:
            raise UsageError(
                f"the GGUF keys say {query} heads over {kv} key/value heads, which do not divide them"
            )
        key_width = keys.size("attention.key_length", width // query)
        if keys.size("rope.dimension_count", key_width) != key_width or key_width % 2:
            raise UsageError(
                f"the GGUF key {cls.arch}.rope.dimension_count must be the even head width {key_width}"
            )
        value_width = keys.size("attention.value_length", width // query)
        if not cls.any_head_width and not query * key_width == query * value_width == width:
            raise UsageError(
                f"the GGUF keys say {query} heads of width {key_width} (values: {value_width}); "
                f"expected heads that make up {cls.arch}.embedding_length = {width}, as llama.cpp does"
            )
        return Heads(query, kv, key_width, value_width)

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

    def constants(self) -> dict[str, Array]:
        return {ROPE_FREQS: np.array(self.rope_factors, np.float32)} if self.rope_factors else {}

    @property
    def heads(self) -> Heads:
        """The heads of the attention."""
        return Heads(self.head_count, self.head_count_kv, self.key_length, self.value_length)

    def linear(self, prefix: str, name: str, inputs: int, outputs: int) -> Linear:
        """A projection back into the residual stream: its start is scaled by the depth, as in GPT-2."""
        std = HEAD_STD / (2 * self.block_count) ** 0.5
        return Linear(f"{prefix}.{name}", inputs, outputs, bias=name in self.biases, std=std)

    def norm(self, name: str) -> RMSNorm:
        """An RMSNorm over the residual stream."""
        return RMSNorm(name, self.embedding_length, self.rms_epsilon)

    def attention(self, prefix: str) -> Layer:
        """The layer x -> attention(norm(x))."""
        width, heads = self.embedding_length, self.heads
        norms = [QKNorm(prefix, self.key_length, self.rms_epsilon)] if self.head_norms else []
        return Chain(
            self.norm(f"{prefix}.attn_norm"),
            ProjectQKV(prefix, width, heads, bias="attn_q" in self.biases),
            *norms,
            RoPE(
                self.rope_freq_base,
                interleaved=self.interleaved,
                factors=self.rope_factors,
                in_place=True,  # projections and norms of heads keep what they are given, not what they give
            ),
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


def read_factors(tensors: Collection[str], read: Read | None, count: int) -> tuple[float, ...]:
    """The `count` values of `rope_freqs.weight`; raises UsageError unless they can divide frequencies."""

    def check(shape: tuple[int, ...]) -> None:
        if shape != (count,):
            raise UsageError(f"{ROPE_FREQS} has shape {shape}, expected ({count},): one a pair of a head")

    if read is None:
        raise UsageError(f"{ROPE_FREQS} is part of the configuration, and nothing was given to read it with")
    if isinstance(tensors, Mapping):
        check(tensors[ROPE_FREQS])  # before anything is read: a shape from a file may be of any size
    values = read(ROPE_FREQS)
    check(values.shape)
    if not (np.isfinite(values) & (values > 0)).all():
        raise UsageError(f"{ROPE_FREQS} divides frequencies: expected finite numbers above 0, found others")
    return tuple(values.tolist())
