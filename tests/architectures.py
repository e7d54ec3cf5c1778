"""Table of all architectures, with a row for each, from which tests build small models.

A row lists the tensors of a file, as llama.cpp defines them, and the settings that switch on
the features of the architecture. `build` makes one model from sizes; `every` makes a model of each row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from zero_mpi.models import ARCHITECTURES, ModelConfig

Sizes = Mapping[str, Any]
Fit = Callable[[Sizes], Sizes]


def any_width(sizes: Sizes) -> Sizes:
    return {}


def one_width(sizes: Sizes) -> Sizes:
    return {"value_length": sizes["key_length"]}


def model_width(sizes: Sizes) -> Sizes:
    width = sizes["embedding_length"] // sizes["head_count"]
    return {"key_length": width, "value_length": width}


def equal_heads(sizes: Sizes) -> Sizes:
    return model_width(sizes) | {"head_count_kv": sizes["head_count"]}


@dataclass(frozen=True)
class Row:
    """Facts about one architecture that the tests need.

    block      tensors of a block and their dimensions: E width, F feed-forward; rows of Q, K, V, T: all
               three; G gate and up; O input columns of the attention output; D of one head; N experts, S the
               shared one
    outer      tensors outside the blocks; V: vocabulary, C: context
    biased     tensors of a block that always have a bias
    settings   fields other than the sizes; every special setting is in use
    fit        function that returns the sizes (such as the head width) changed as the architecture requires
    blocks     number of blocks; every kind of block occurs
    tolerance  largest difference of log-probabilities from llama.cpp, whose GELU is a table of 16-bit floats
    ties       whether llama.cpp opens a file without a head and uses the embedding instead
    flags      flags of `zero_mpi.train` other than --arch
    needed     further sizes that this architecture's `from_flags` requires
    """

    block: Mapping[str, str]
    outer: Mapping[str, str] = field(default_factory=lambda: {"token_embd": "VE", "output_norm": "E"})
    biased: tuple[str, ...] = ()
    settings: Sizes = field(default_factory=dict)
    fit: Fit = any_width
    blocks: int = 2
    tolerance: float = 1e-4
    ties: bool = True
    flags: tuple[str, ...] = ("--kv-heads", "1", "--tied")
    needed: Sizes = field(default_factory=dict)


QKV = ("attn_q", "attn_k", "attn_v")
PROJECTIONS = {"attn_q": "QE", "attn_k": "KE", "attn_v": "VE", "attn_output": "EO"}
GATED = {"ffn_gate": "FE", "ffn_up": "FE", "ffn_down": "EF"}
LLAMA = {"attn_norm": "E", **PROJECTIONS, "ffn_norm": "E", **GATED}
HEAD_NORMS = {"attn_q_norm": "D", "attn_k_norm": "D"}
PHI3 = {"attn_norm": "E", "attn_qkv": "TE", "attn_output": "EO", "ffn_norm": "E"}
PHI3 |= {"ffn_up": "GE", "ffn_down": "EF"}
OLMO2 = PROJECTIONS | GATED | {"attn_q_norm": "Q", "attn_k_norm": "K"}
OLMO2 |= {"post_attention_norm": "E", "post_ffw_norm": "E"}
MIXED = {"ffn_gate_inp": "NE", "ffn_gate_exps": "NFE", "ffn_up_exps": "NFE", "ffn_down_exps": "NEF"}
MOE = {"attn_norm": "E", **PROJECTIONS, "ffn_norm": "E", **MIXED}
SHARED = {"ffn_gate_shexp": "SE", "ffn_up_shexp": "SE", "ffn_down_shexp": "ES"}
EXPERTS = {"expert_count": 5, "expert_used_count": 2}
GPT2 = {"attn_norm": "E", "attn_qkv": "TE", "attn_output": "EE", "ffn_norm": "E"}
GPT2 |= {"ffn_up": "FE", "ffn_down": "EF"}

GRANITE = {"embedding_scale": 3.0, "residual_scale": 0.375, "attention_scale": 0.75, "logit_scale": 1.5}

FOUR = {"experts": 4}
MIXTURE = ("--kv-heads", "1", "--tied", "--experts", "4")
ROWS = {
    "llama": Row(LLAMA),
    "gpt2": Row(
        GPT2,
        {"token_embd": "VE", "position_embd": "CE", "output_norm": "E"},
        biased=tuple(GPT2),
        tolerance=2e-2,
        flags=(),
    ),
    "qwen2": Row(LLAMA, biased=QKV, fit=model_width),
    "qwen3": Row(LLAMA | HEAD_NORMS, fit=one_width),
    "gemma3": Row(
        LLAMA | HEAD_NORMS | {"post_attention_norm": "E", "post_ffw_norm": "E"},
        settings={"sliding_window": 3, "rope_freq_base": 200.0},
        fit=one_width,
        blocks=6,
        tolerance=2e-2,
        flags=("--kv-heads", "1", "--tied", "--layers", "6"),
    ),
    "granite": Row(LLAMA, settings=GRANITE),
    "qwen3moe": Row(MOE | HEAD_NORMS, settings=EXPERTS, fit=one_width, flags=MIXTURE, needed=FOUR),
    "olmoe": Row(
        MOE | {"attn_q_norm": "Q", "attn_k_norm": "K"},
        settings=EXPERTS,
        fit=equal_heads,
        ties=False,
        flags=("--experts", "4"),
        needed=FOUR,
    ),
    "granitemoe": Row(
        MOE | SHARED,
        settings=EXPERTS | GRANITE | {"expert_shared_feed_forward_length": 7},
        flags=MIXTURE,
        needed=FOUR,
    ),
    "phi3": Row(PHI3, fit=model_width),
    "olmo2": Row(OLMO2, fit=model_width, ties=False, flags=("--kv-heads", "1")),
    "smollm3": Row(LLAMA, fit=one_width, blocks=4, flags=("--kv-heads", "1", "--tied", "--layers", "4")),
}


def build(arch: str, sizes: Sizes, **changes: Any) -> ModelConfig:
    """Return a row's model with a test's sizes and an untied head; `changes` overrides fields."""
    row, kind = ROWS[arch], ARCHITECTURES[arch]
    settings = {"block_count": row.blocks, "tied": False, **sizes, **row.fit(sizes), **row.settings}
    names = {part.name for part in fields(kind)}
    config = kind(**{name: value for name, value in settings.items() if name in names})
    return replace(config, **changes)


def every(sizes: Sizes, **changes: Any) -> dict[str, ModelConfig]:
    return {arch: build(arch, sizes, **changes) for arch in ROWS}


def tied(models: Mapping[str, ModelConfig]) -> dict[str, ModelConfig]:
    """Return "ARCHITECTURE, tied" -> model with the embedding as its head, where that is possible."""
    return {f"{arch}, tied": replace(config, tied=True) for arch, config in models.items() if ROWS[arch].ties}


def tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a model's tensors as llama.cpp requires them, in no particular order."""
    row, heads = ROWS[config.arch], config.head_count
    kv = getattr(config, "head_count_kv", heads)
    key, value = (
        getattr(config, name, config.embedding_length // heads) for name in ("key_length", "value_length")
    )
    lengths = {"E": config.embedding_length, "F": config.feed_forward_length}
    lengths |= {"Q": heads * key, "K": kv * key, "V": kv * value, "O": heads * value, "D": key}
    lengths["N"] = getattr(config, "expert_count", 0)
    lengths["S"] = getattr(config, "expert_shared_feed_forward_length", 0)
    lengths["G"] = 2 * config.feed_forward_length
    lengths["T"] = lengths["Q"] + lengths["K"] + lengths["V"]
    names = [name for name, letters in row.block.items() if lengths["S"] or "S" not in letters]
    biased = getattr(config, "biases", row.biased)

    def shape(letters: str, lengths: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(lengths[letter] for letter in letters)

    block = {f"{name}.weight": shape(row.block[name], lengths) for name in names}
    block |= {f"{name}.bias": shape(row.block[name], lengths)[:1] for name in biased}
    around = lengths | {"V": config.vocab_size, "C": config.context_length}
    outer = row.outer if config.tied else {**row.outer, "output": "VE"}
    shapes = {f"{name}.weight": shape(letters, around) for name, letters in outer.items()}
    if config.arch == "gpt2":
        shapes["output_norm.bias"] = (config.embedding_length,)
    return shapes | {
        f"blk.{i}.{name}": shape for i in range(config.block_count) for name, shape in block.items()
    }
