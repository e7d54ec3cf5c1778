"""Base class of llama and related models: RMSNorm, rotary positions, grouped attention, gated feed-forward.

The architectures differ in class variables: the rotary order of the rows of q and k, the positions of norms,
blocks without rotary positions, biases, and the tensors that llama.cpp reads. For other differences,
architectures override methods. A file determines which of the possible biases a model has. Annotations are
not strings in this module, because subclasses in other modules inherit them in their signatures.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from zero_mpi import nn
from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError
from zero_mpi.files.gguf_keys import MOST_SIZE
from zero_mpi.models.model_config import ModelConfig, ModelKeys, Read
from zero_mpi.ops.elementary import log

ROPE_FREQS = "rope_freqs.weight"
NONE, LINEAR, YARN = "none", "linear", "yarn"
TYPE, FACTOR, ORIGINAL = (f"rope.scaling.{name}" for name in ("type", "factor", "original_context_length"))
OLD_FACTOR = "rope.scale_linear"
# Within the original context, a high frequency makes at least FAST rotations, a low one at most SLOW.
FAST, SLOW = 32.0, 1.0
# Keys of YaRN's other constants, with the only supported value of each key.
FIXED = {
    "rope.scaling.yarn_beta_fast": FAST,
    "rope.scaling.yarn_beta_slow": SLOW,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary positions beyond the original context of a model.

    `linear` divides all frequencies by a factor (Chen et al., 2023). `yarn` keeps high frequencies, divides
    low frequencies, interpolates along a ramp between them, and multiplies q and k by a magnitude that grows
    with the logarithm of the factor (Peng et al., "YaRN", 2023). Llama 3 has a tensor with divisors instead.
    original: for yarn, the context before scaling
    """

    kind: str
    factor: float
    original: int = 0

    @classmethod
    def from_gguf(cls, keys: ModelKeys) -> Self | None:
        """Return the scaling in a file's keys, or None; raise UsageError for unsupported values."""
        for name, supported in FIXED.items():
            keys.require(name, supported)
        kind = keys.text(TYPE) or LINEAR  # llama.cpp's default
        factor = keys.number(FACTOR, 0) or keys.number(OLD_FACTOR, 0) or 1.0
        if kind == NONE or (kind == LINEAR and factor == 1):
            return None
        if kind not in (LINEAR, YARN):
            keys.refuse([TYPE])
        if kind == LINEAR:
            return cls(kind, factor)
        base = keys.number("rope.freq_base", 10000.0)
        if factor < 1 or base <= 1:
            raise UsageError(
                f"the GGUF keys {keys.arch}.rope.*: yarn needs a factor of at least 1 and a base above 1, "
                f"found {factor:g} and {base:g}"
            )
        return cls(kind, factor, keys.size(ORIGINAL, keys.size("context_length")))

    def metadata(self) -> dict[str, Any]:
        """Return the GGUF keys of this scaling, without the architecture's prefix."""
        keys = {TYPE: self.kind, FACTOR: np.float32(self.factor)}
        return keys if self.kind == LINEAR else keys | {ORIGINAL: np.uint32(self.original)}

    def divisors(self, width: int, base: float) -> tuple[float, ...]:
        """Return the divisors of the width / 2 frequencies of a head."""
        pairs = np.arange(width // 2)
        if self.kind == LINEAR:
            return (self.factor,) * len(pairs)
        # The ramp is between the last pair of high frequency and the first pair of low frequency.
        first, last = (
            width * log(self.original / (turns * 2 * math.pi)) / (2 * log(base)) for turns in (FAST, SLOW)
        )
        low, high = max(0.0, math.floor(first)), min(width - 1.0, math.ceil(last))
        weight = 1 - np.clip((pairs - low) / max(0.001, high - low), 0, 1)
        return tuple((1 / (weight + (1 - weight) / self.factor)).tolist())

    @property
    def magnitude(self) -> float:
        """Factor by which queries and keys are multiplied when they are rotated."""
        return 1.0 + 0.1 * log(self.factor) if self.kind == YARN else 1.0


def read_factors(
    tensors: Collection[str], read: Read | None, count: int, name: str = ROPE_FREQS
) -> tuple[float, ...]:
    """Return the `count` values of a tensor; raise UsageError unless they can divide frequencies."""

    def check(shape: tuple[int, ...]) -> None:
        if shape != (count,):
            raise UsageError(f"{name} has shape {shape}, expected ({count},): one per pair of a head")

    if read is None:
        raise UsageError(f"{name} is part of the configuration, but no reader for it was given")
    if isinstance(tensors, Mapping):
        check(tensors[name])  # checked before reading, because a file may declare a huge shape
    values = read(name)
    check(values.shape)
    if not (np.isfinite(values) & (values > 0)).all():
        raise UsageError(f"{name} divides frequencies: expected only finite numbers above 0")
    return tuple(values.tolist())


# `attention.sliding_window` is not listed: files of qwen2 have it although their models attend to all
# positions (`use_sliding_window` is off), and llama.cpp ignores it for these architectures.
UNSUPPORTED_KEYS: tuple[str, ...] = ("attention.scale", "attention.clamp_kqv", "rope.scaling.attn_factor")
UNSUPPORTED_KEYS += ("expert_shared_count", "expert_group_count", "expert_group_used_count")
UNSUPPORTED_KEYS += ("expert_gating_func", "expert_weights_scale", "leading_dense_block_count")
QKV_BIASES = frozenset({"attn_q", "attn_k", "attn_v"})


@dataclass(frozen=True)
class RotaryModel(ModelConfig):
    """Configuration of a rotary model; `biases` names the projections with a bias ("attn_q", "ffn_up", ...).

    `rope_factors` (one per pair, or none) divide the rotary frequencies; they are float32. RoPE rotates the
    first `rope_dimension_count` elements of a head; 0: all.
    """

    interleaved: ClassVar[bool] = False  # rotary pairs are adjacent rows (NORM), not two halves (NEOX)
    head_norms: ClassVar[bool] = False  # q and k are normalized per head
    joint_norms: ClassVar[bool] = False  # q and k are normalized over all heads together
    norms_before: ClassVar[bool] = True  # inputs of attention and feed-forward are normalized (pre-norm)
    norms_after: ClassVar[bool] = False  # outputs of attention and feed-forward are normalized (post-norm)
    rope_free_period: ClassVar[int] = 0  # one block in this many has no rotary positions; 0: all have them
    may_tie: ClassVar[bool] = True  # llama.cpp accepts a tied head
    projection: ClassVar[type[nn.ProjectQKV]] = nn.ProjectQKV  # layer that computes q, k and v
    activation: ClassVar[type[nn.SwiGLU]] = nn.SwiGLU  # gated activation of the feed-forward
    refusals: ClassVar[tuple[str, ...]] = UNSUPPORTED_KEYS  # unsupported keys that change results
    any_head_width: ClassVar[bool] = True  # llama.cpp accepts heads whose total width is not the model's
    possible_biases: ClassVar[frozenset[str]] = QKV_BIASES  # projections for which llama.cpp accepts a bias
    normalized: ClassVar[bool] = True  # the weights of the used experts sum to 1
    expert_width: ClassVar[str] = "feed_forward_length"  # key of an expert's width
    takes_rope_factors: ClassVar[bool] = False  # llama.cpp accepts `rope_freqs.weight`
    head_count_kv: int
    key_length: int
    value_length: int
    rms_epsilon: float = float(np.float32(1e-5))
    rope_freq_base: float = 10000.0
    biases: frozenset[str] = frozenset()
    rope_factors: tuple[float, ...] = ()
    rope_scaling: RopeScaling | None = None
    rope_dimension_count: int = 0
    expert_count: int = 0
    expert_used_count: int = 0

    @classmethod
    def flag_fields(cls, sizes: Mapping[str, Any]) -> dict[str, Any]:
        dim, heads = sizes["dim"], sizes["heads"]
        if sizes["tied"] and not cls.may_tie:
            raise UsageError(f"--tied: {cls.arch} models have an untied head; leave the flag out")
        kv_heads = heads if sizes["kv_heads"] is None else sizes["kv_heads"]
        if kv_heads < 1 or heads % kv_heads:
            uneven = f"--kv-heads {kv_heads} does not divide --heads {heads}"
            raise UsageError(f"{uneven}: each key/value head serves the same number of query heads")
        if dim // heads % 2:
            odd = f"--dim {dim} / --heads {heads} = {dim // heads} is odd"
            raise UsageError(f"{odd}: rotary positions rotate pairs of columns, so heads need an even width")
        return {
            "tied": bool(sizes["tied"]),
            "head_count_kv": kv_heads,
            "key_length": dim // heads,
            "value_length": dim // heads,
            "feed_forward_length": sizes["ffn"] or -(-8 * dim // 3 // 32) * 32,
        }

    @classmethod
    def file_fields(cls, keys: ModelKeys, tensors: Collection[str], read: Read | None) -> dict[str, Any]:
        keys.refuse(cls.refusals)
        if not cls.may_tie and "output.weight" not in tensors:
            raise UsageError(f"output.weight is missing: {cls.arch} models have an untied head")
        heads = cls.read_heads(keys, keys.size("embedding_length"))
        turned = keys.size("rope.dimension_count", heads.key_width)
        factors = cls.takes_rope_factors and ROPE_FREQS in tensors
        return {
            "head_count": heads.query,
            "head_count_kv": heads.kv,
            "key_length": heads.key_width,
            "value_length": heads.value_width,
            "rms_epsilon": keys.number("attention.layer_norm_rms_epsilon"),
            "rope_freq_base": keys.number("rope.freq_base", 10000.0, least=1.0),
            "biases": frozenset(name for name in cls.possible_biases if f"blk.0.{name}.bias" in tensors),
            "rope_factors": read_factors(tensors, read, turned // 2) if factors else (),
            "rope_scaling": RopeScaling.from_gguf(keys),
            "rope_dimension_count": turned % heads.key_width,
            **cls.read_experts(keys, tensors),
        }

    @classmethod
    def read_experts(cls, keys: ModelKeys, tensors: Collection[str]) -> dict[str, Any]:
        """Return the width of the feed-forward and the numbers of experts that a file describes."""
        width = keys.size("feed_forward_length")
        if not cls.may_have_experts:
            keys.refuse(("expert_count",))
        if not cls.needs_experts and not keys.keys.integer(f"{cls.arch}.expert_count", 0, MOST_SIZE):
            return {"feed_forward_length": width}
        if "blk.0.ffn_gate.0.weight" in tensors:
            raise UsageError("blk.0.ffn_gate.0.weight: expected stacked experts; convert the model again")
        count, used = keys.size("expert_count"), keys.size("expert_used_count")
        if used > count:
            raise UsageError(
                f"the GGUF key {cls.arch}.expert_used_count = {used}: expected at most {count} (experts)"
            )
        width = keys.size(cls.expert_width, width // used)
        return {"feed_forward_length": width, "expert_count": count, "expert_used_count": used}

    @classmethod
    def read_heads(cls, keys: ModelKeys, width: int) -> nn.Heads:
        """Return the attention heads from a file's keys; raise UsageError if the keys do not fit together."""
        query = keys.size("attention.head_count")
        kv = keys.size("attention.head_count_kv", query)
        if query % kv:
            raise UsageError(
                f"the GGUF keys give {query} heads over {kv} key/value heads, expected a multiple of {kv}"
            )
        key_width = keys.size("attention.key_length", width // query)
        turned = keys.size("rope.dimension_count", key_width)
        if turned > key_width or turned % 2 or key_width % 2:
            raise UsageError(
                f"the GGUF key {cls.arch}.rope.dimension_count = {turned}: expected an even number, at most "
                f"the head width {key_width}, which must also be even"
            )
        value_width = keys.size("attention.value_length", width // query)
        if not cls.any_head_width and not query * key_width == query * value_width == width:
            raise UsageError(
                f"the GGUF keys give {query} heads of width {key_width} (values: {value_width}); "
                f"expected a total width of {cls.arch}.embedding_length = {width}, as llama.cpp does"
            )
        return nn.Heads(query, kv, key_width, value_width)

    def values_by_key(self) -> dict[str, Any]:
        keys = {
            "attention.head_count_kv": np.uint32(self.head_count_kv),
            "attention.layer_norm_rms_epsilon": np.float32(self.rms_epsilon),
            "attention.key_length": np.uint32(self.key_length),
            "attention.value_length": np.uint32(self.value_length),
            "rope.dimension_count": np.uint32(self.rotary_width),
            "rope.freq_base": np.float32(self.rope_freq_base),
        }
        if self.expert_count:
            keys["expert_count"] = np.uint32(self.expert_count)
            keys["expert_used_count"] = np.uint32(self.expert_used_count)
            keys[self.expert_width] = np.uint32(self.feed_forward_length)
        if self.rope_scaling is not None:
            keys |= self.rope_scaling.metadata()
        return super().values_by_key() | keys

    def constants(self) -> dict[str, Array]:
        return {ROPE_FREQS: np.array(self.rope_factors, np.float32)} if self.rope_factors else {}

    @property
    def heads(self) -> nn.Heads:
        return nn.Heads(self.head_count, self.head_count_kv, self.key_length, self.value_length)

    def linear(self, prefix: str, name: str, inputs: int, outputs: int) -> nn.Linear:
        """Return a projection into the residual stream."""
        return nn.Linear(f"{prefix}.{name}", inputs, outputs, bias=name in self.biases, std=self.residual_std)

    def norm(self, name: str) -> nn.RMSNorm:
        return nn.RMSNorm(name, self.embedding_length, self.rms_epsilon)

    def branch(self, before: str, after: str, *layers: nn.Layer) -> nn.Layer:
        first = [self.norm(before)] if self.norms_before else []
        last = [self.norm(after)] if self.norms_after else []
        return nn.Chain(*first, *layers, *last)

    def attention(self, prefix: str) -> nn.Layer:
        width, heads = self.embedding_length, self.heads
        return self.branch(
            f"{prefix}.attn_norm",
            f"{prefix}.post_attention_norm",
            self.projection(prefix, width, heads, bias="attn_q" in self.biases),
            *self.norms_of_heads(prefix),
            *self.turn(block_number(prefix)),
            nn.CausalAttention(self.score_scale, self.window(block_number(prefix))),
            nn.MergeHeads(),
            self.linear(prefix, "attn_output", heads.query * heads.value_width, width),
        )

    def norms_of_heads(self, prefix: str) -> list[nn.Layer]:
        if self.joint_norms:
            return [nn.JointQKNorm(prefix, self.heads, self.rms_epsilon)]
        return [nn.QKNorm(prefix, self.key_length, self.rms_epsilon)] if self.head_norms else []

    def turn(self, block: int) -> list[nn.Layer]:
        """Return a list with the RoPE layer of a block; empty if it has none."""
        if self.rope_free_period and (block + 1) % self.rope_free_period == 0:
            return []
        return [
            nn.RoPE(
                self.rope_freq_base,
                interleaved=self.interleaved,
                factors=self.divisors,
                magnitude=self.magnitude,
                width=self.rotary_width,
            )
        ]

    def window(self, block: int) -> int | None:
        """Return the number of positions that a block attends to; None: all earlier positions."""
        return None

    @property
    def rotary_width(self) -> int:
        """Number of elements of a head that RoPE rotates."""
        return self.rope_dimension_count or self.key_length

    @property
    def divisors(self) -> tuple[float, ...]:
        """Divisors of the rotary frequencies; empty: none."""
        if self.rope_scaling is None:
            return self.rope_factors
        scaled = self.rope_scaling.divisors(self.rotary_width, self.rope_freq_base)
        base = self.rope_factors or (1.0,) * len(scaled)
        return tuple(a * b for a, b in zip(base, scaled, strict=True))

    @property
    def magnitude(self) -> float:
        return 1.0 if self.rope_scaling is None else self.rope_scaling.magnitude

    @property
    def score_scale(self) -> float:
        return float(self.key_length**-0.5)

    def feed_forward(self, prefix: str) -> nn.Layer:
        width, hidden = self.embedding_length, self.feed_forward_length
        dense = (
            self.activation(prefix, width, hidden, bias="ffn_gate" in self.biases),
            self.linear(prefix, "ffn_down", hidden, width),
        )
        layers = [self.experts(prefix)] if self.expert_count else dense
        return self.branch(f"{prefix}.ffn_norm", f"{prefix}.post_ffw_norm", *layers)

    def experts(self, prefix: str, shared: nn.Layer | None = None) -> nn.Layer:
        """Return the mixture of experts of a block; `shared`: a layer that gets every token."""
        sizes = self.embedding_length, self.feed_forward_length, self.expert_count, self.expert_used_count
        return nn.Experts(prefix, *sizes, normalized=self.normalized, std=self.residual_std, shared=shared)

    def block(self, prefix: str) -> nn.Layer:
        return nn.Chain(nn.Residual(self.attention(prefix)), nn.Residual(self.feed_forward(prefix)))

    def embedding(self) -> nn.Layer:
        return nn.Embedding("token_embd", self.vocab_size, self.embedding_length)

    def final_norm(self) -> nn.Layer:
        return self.norm("output_norm")

    def layers(self) -> list[nn.Stage]:
        blocks = [nn.Stage(f"blk.{i}", self.block(f"blk.{i}")) for i in range(self.block_count)]
        return [nn.Stage("token_embd", self.embedding()), *blocks, *self.head(self.final_norm())]


def block_number(prefix: str) -> int:
    return int(prefix.rpartition(".")[2])
