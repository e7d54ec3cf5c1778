"""Base of llama and related models: RMSNorm, rotary positions, grouped attention, a gated feed-forward.

The architectures differ in class variables: the rotary order of the rows of q and k, the places of norms,
blocks without rotary positions, biases, and the tensors that llama.cpp reads. Other differences are methods
of an architecture. A file decides which of the possible biases a model has. Annotations are not strings here,
because subclasses in other modules inherit them in their signatures.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from zero_mpi.device.types import Array
from zero_mpi.errors import UsageError
from zero_mpi.files.gguf_keys import MOST_SIZE
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
from zero_mpi.models.rope_scaling import ROPE_FREQS, RopeScaling, read_factors
from zero_mpi.nn import (
    CausalAttention,
    Chain,
    Embedding,
    Experts,
    Heads,
    JointQKNorm,
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

# `attention.sliding_window` is not listed: files of qwen2 have it although their models attend to all
# positions (`use_sliding_window` is off), and llama.cpp does not read it for these architectures.
UNSUPPORTED_KEYS: tuple[str, ...] = ("attention.scale", "attention.clamp_kqv", "rope.scaling.attn_factor")
UNSUPPORTED_KEYS += ("expert_shared_count", "expert_group_count", "expert_group_used_count")
UNSUPPORTED_KEYS += ("expert_gating_func", "expert_weights_scale", "leading_dense_block_count")
QKV_BIASES = frozenset({"attn_q", "attn_k", "attn_v"})


@dataclass(frozen=True)
class RotaryModel(ModelConfig):
    """Sizes of a rotary model; `biases` names the projections with a bias ("attn_q", "ffn_up", ...).

    `rope_factors` (one per pair, or none) divide the rotary frequencies; each is a float32. RoPE rotates the
    first `rope_dimension_count` elements of a head; 0: all.
    """

    interleaved: ClassVar[bool]
    """True if rotary pairs are adjacent rows of q and k (llama.cpp's NORM), not one of each half (NEOX)."""
    head_norms: ClassVar[bool] = False
    """Apply a norm to q and k, per head."""
    joint_norms: ClassVar[bool] = False
    """Apply a norm to q and k, over all heads together."""
    norms_before: ClassVar[bool] = True
    """Apply a norm to the input of attention and feed-forward (pre-norm)."""
    norms_after: ClassVar[bool] = False
    """Apply a norm to the output of attention and feed-forward (post-norm)."""
    unturned: ClassVar[int] = 0
    """Period of blocks without rotary positions: every `unturned`-th block has none; 0: all have them."""
    may_tie: ClassVar[bool] = True
    """True if llama.cpp accepts a tied head."""
    projected: ClassVar[type[ProjectQKV]] = ProjectQKV
    """Layer that computes q, k and v."""
    gated: ClassVar[type[SwiGLU]] = SwiGLU
    """Gated activation of the feed-forward."""
    refused: ClassVar[tuple[str, ...]] = UNSUPPORTED_KEYS
    """GGUF keys that are refused, because they would change the result."""
    any_head_width: ClassVar[bool] = True
    """True if llama.cpp accepts heads whose total width differs from the model's."""
    possible_biases: ClassVar[frozenset[str]] = QKV_BIASES
    """Projections for which llama.cpp accepts a bias."""
    normalized: ClassVar[bool] = True
    """True if the weights of the used experts sum to 1."""
    expert_width: ClassVar[str] = "feed_forward_length"
    """Key of an expert's width."""
    takes_rope_factors: ClassVar[bool] = False
    """True if llama.cpp reads `rope_freqs.weight`; otherwise it refuses a file with that tensor."""
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
    def from_flags(cls, sizes: Mapping[str, Any]) -> Self:
        sizes = check_sizes(sizes)
        common = common_sizes(sizes)
        dim, heads = sizes["dim"], sizes["heads"]
        if sizes.get("tied") and not cls.may_tie:
            raise UsageError(f"--tied: {cls.arch} models have an untied head; leave the flag out")
        kv_heads = heads if sizes.get("kv_heads") is None else sizes["kv_heads"]
        uneven = f"--kv-heads {kv_heads} does not divide --heads {heads}"
        require_divides(heads, kv_heads, uneven, "each key/value head serves the same number of query heads")
        odd = f"--dim {dim} / --heads {heads} = {dim // heads} is odd"
        why = "rotary positions rotate pairs of columns, so the head width must be even"
        require_divides(dim // heads, 2, odd, why)
        width = {"feed_forward_length": sizes.get("ffn") or -(-8 * dim // 3 // 32) * 32}
        return cls(
            **common,
            tied=bool(sizes.get("tied")),
            head_count_kv=kv_heads,
            key_length=dim // heads,
            value_length=dim // heads,
            **width | cls.experts_from_flags(sizes),
        )

    @classmethod
    def from_gguf(cls, metadata: Metadata, tensors: Iterable[str], read: Read | None = None) -> Self:
        tensors = tensors if isinstance(tensors, Mapping) else set(tensors)
        keys = ModelKeys(cls.arch, metadata)
        keys.refuse_non_causal()
        keys.refuse(cls.refused)
        if not cls.may_tie and "output.weight" not in tensors:
            raise UsageError(f"output.weight is missing: {cls.arch} models have an untied head")
        heads = cls.read_heads(keys, keys.size("embedding_length"))
        turned = keys.size("rope.dimension_count", heads.key_width)
        factors = cls.takes_rope_factors and ROPE_FREQS in tensors
        return cls(
            vocab_size=vocabulary(metadata, keys),
            context_length=keys.size("context_length"),
            embedding_length=keys.size("embedding_length"),
            block_count=keys.blocks(tensors),
            head_count=heads.query,
            head_count_kv=heads.kv,
            key_length=heads.key_width,
            value_length=heads.value_width,
            rms_epsilon=keys.number("attention.layer_norm_rms_epsilon"),
            rope_freq_base=keys.number("rope.freq_base", 10000.0, least=1.0),
            tied="output.weight" not in tensors,
            biases=frozenset(name for name in cls.possible_biases if f"blk.0.{name}.bias" in tensors),
            rope_factors=read_factors(tensors, read, turned // 2) if factors else (),
            rope_scaling=RopeScaling.from_gguf(keys),
            rope_dimension_count=turned % heads.key_width,
            **cls.read_experts(keys, tensors),
            **cls.own_fields(keys, tensors, read),
        )

    @classmethod
    def read_experts(cls, keys: ModelKeys, tensors: Collection[str]) -> dict[str, Any]:
        """Return the width of the feed-forward and the numbers of experts that a file describes."""
        width = keys.size("feed_forward_length")
        if not cls.may_have_experts:
            keys.refuse(("expert_count",))
        if not cls.needs_experts and not keys.keys.whole(f"{cls.arch}.expert_count", 0, MOST_SIZE):
            return {"feed_forward_length": width}
        if "blk.0.ffn_gate.0.weight" in tensors:
            raise UsageError("blk.0.ffn_gate.0.weight: a tensor for each expert; convert the model again")
        count, used = keys.size("expert_count"), keys.size("expert_used_count")
        if used > count:
            raise UsageError(
                f"the GGUF key {cls.arch}.expert_used_count = {used}: expected at most {count}, the experts"
            )
        width = keys.size(cls.expert_width, width // used)
        return {"feed_forward_length": width, "expert_count": count, "expert_used_count": used}

    @classmethod
    def own_fields(cls, keys: ModelKeys, tensors: Collection[str], read: Read | None) -> dict[str, Any]:
        """Return the fields that only this architecture has, read from a file."""
        return {}

    @classmethod
    def read_heads(cls, keys: ModelKeys, width: int) -> Heads:
        """Return the attention heads that a file's keys describe; raise UsageError if they do not fit."""
        query = keys.size("attention.head_count")
        kv = keys.size("attention.head_count_kv", query)
        if query % kv:
            raise UsageError(
                f"the GGUF keys say {query} heads over {kv} key/value heads, which do not divide them"
            )
        key_width = keys.size("attention.key_length", width // query)
        turned = keys.size("rope.dimension_count", key_width)
        if turned > key_width or turned % 2 or key_width % 2:
            raise UsageError(
                f"the GGUF key {cls.arch}.rope.dimension_count = {turned}: expected an even number, at most "
                f"the even head width {key_width}"
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
            "rope.dimension_count": np.uint32(self.turned_width),
            "rope.freq_base": np.float32(self.rope_freq_base),
        }
        if self.expert_count:
            keys["expert_count"] = np.uint32(self.expert_count)
            keys["expert_used_count"] = np.uint32(self.expert_used_count)
            keys[self.expert_width] = np.uint32(self.feed_forward_length)
        if self.rope_scaling is not None:
            keys |= self.rope_scaling.metadata()
        return super().metadata() | {f"{self.arch}.{name}": value for name, value in keys.items()}

    def constants(self) -> dict[str, Array]:
        return {ROPE_FREQS: np.array(self.rope_factors, np.float32)} if self.rope_factors else {}

    @property
    def heads(self) -> Heads:
        """Numbers and widths of the attention heads."""
        return Heads(self.head_count, self.head_count_kv, self.key_length, self.value_length)

    def linear(self, prefix: str, name: str, inputs: int, outputs: int) -> Linear:
        """Return a projection into the residual stream: depth scales its initialization, as in GPT-2."""
        std = HEAD_STD / (2 * self.block_count) ** 0.5
        return Linear(f"{prefix}.{name}", inputs, outputs, bias=name in self.biases, std=std)

    def norm(self, name: str) -> RMSNorm:
        """Return an RMSNorm over the residual stream."""
        return RMSNorm(name, self.embedding_length, self.rms_epsilon)

    def branch(self, before: str, after: str, *layers: Layer) -> Layer:
        """Return the layers of attention or feed-forward, between the architecture's norms."""
        first = [self.norm(before)] if self.norms_before else []
        last = [self.norm(after)] if self.norms_after else []
        return Chain(*first, *layers, *last)

    def attention(self, prefix: str) -> Layer:
        """Return the layer x -> attention(norm(x))."""
        width, heads = self.embedding_length, self.heads
        return self.branch(
            f"{prefix}.attn_norm",
            f"{prefix}.post_attention_norm",
            self.projected(prefix, width, heads, bias="attn_q" in self.biases),
            *self.norms_of_heads(prefix),
            *self.turn(block_number(prefix)),
            CausalAttention(self.score_scale, self.window(block_number(prefix))),
            MergeHeads(),
            self.linear(prefix, "attn_output", heads.query * heads.value_width, width),
        )

    def norms_of_heads(self, prefix: str) -> list[Layer]:
        """Return the layer that normalizes q and k, if the architecture has one."""
        if self.joint_norms:
            return [JointQKNorm(prefix, self.heads, self.rms_epsilon)]
        return [QKNorm(prefix, self.key_length, self.rms_epsilon)] if self.head_norms else []

    def turn(self, block: int) -> list[Layer]:
        """Return the RoPE layer of a block, if it has one."""
        if self.unturned and (block + 1) % self.unturned == 0:
            return []
        return [
            RoPE(
                self.rope_freq_base,
                interleaved=self.interleaved,
                factors=self.divisors,
                magnitude=self.magnitude,
                width=self.turned_width,
                in_place=True,
            )
        ]

    def window(self, block: int) -> int | None:
        """Return the number of positions that a block attends to; None: all earlier positions."""
        return None

    @property
    def turned_width(self) -> int:
        """Elements of a head that RoPE rotates."""
        return self.rope_dimension_count or self.key_length

    @property
    def divisors(self) -> tuple[float, ...]:
        """Divisors of the rotary frequencies; empty: none."""
        if self.rope_scaling is None:
            return self.rope_factors
        scaled = self.rope_scaling.divisors(self.turned_width, self.rope_freq_base)
        own = self.rope_factors or (1.0,) * len(scaled)
        return tuple(a * b for a, b in zip(own, scaled, strict=True))

    @property
    def magnitude(self) -> float:
        """Factor by which q and k are multiplied when they are rotated."""
        return 1.0 if self.rope_scaling is None else self.rope_scaling.magnitude

    @property
    def score_scale(self) -> float:
        """Factor by which products of queries and keys are multiplied."""
        return float(self.key_length**-0.5)

    def feed_forward(self, prefix: str) -> Layer:
        """Return the layer x -> down(gated pair(norm(x))), or the mixture of experts of norm(x)."""
        width, hidden = self.embedding_length, self.feed_forward_length
        dense = (
            self.gated(prefix, width, hidden, bias="ffn_gate" in self.biases),
            self.linear(prefix, "ffn_down", hidden, width),
        )
        layers = [self.experts(prefix)] if self.expert_count else dense
        return self.branch(f"{prefix}.ffn_norm", f"{prefix}.post_ffw_norm", *layers)

    def experts(self, prefix: str, shared: Layer | None = None) -> Layer:
        """Return the mixture of experts of a block; `shared`: a layer that sees every token."""
        sizes = self.embedding_length, self.feed_forward_length, self.expert_count, self.expert_used_count
        std = HEAD_STD / (2 * self.block_count) ** 0.5
        return Experts(prefix, *sizes, normalized=self.normalized, std=std, shared=shared)

    def block(self, prefix: str) -> Layer:
        """Return the layer x + attention(norm(x)), then x + feed_forward(norm(x))."""
        return Chain(Residual(self.attention(prefix)), Residual(self.feed_forward(prefix)))

    def embedding(self) -> Layer:
        """Return the layer that maps tokens to vectors."""
        return Embedding("token_embd", self.vocab_size, self.embedding_length)

    def final_norm(self) -> Layer:
        """Return the norm before the head."""
        return self.norm("output_norm")

    def layers(self) -> list[Stage]:
        blocks = [Stage(f"blk.{i}", self.block(f"blk.{i}")) for i in range(self.block_count)]
        head = head_stages(self.final_norm(), self.embedding_length, self.vocab_size, self.tied)
        return [Stage("token_embd", self.embedding()), *blocks, *head]


def block_number(prefix: str) -> int:
    """Return the block number in a prefix of names: 3 for `blk.3`."""
    return int(prefix.rpartition(".")[2])
