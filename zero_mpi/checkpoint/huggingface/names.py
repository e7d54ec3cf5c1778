"""Names of tensors, in GGUF and in Hugging Face folders, and the order of elements that goes with them.

GGUF keeps llama's q and k in interleaved rotary order and all matrices as (out, in); Hugging Face keeps the
two halves of a head apart, and gpt2's matrices as (in, out). Nothing in a file tells a missed conversion:
shapes may agree, and the model speaks nonsense.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum

from zero_mpi.errors import FileError
from zero_mpi.files.foreign import show


class Order(Enum):
    """How elements lie in the folder, beside how they lie in GGUF."""

    SAME = "same"
    HALVES = "halves"  # rows of a head: first those of even place in GGUF, then those of odd place
    TRANSPOSED = "transposed"
    LESS_ONE = "less one"  # the elements themselves: weights of norms that are kept as what is added to 1


@dataclass(frozen=True)
class Family:
    """One architecture: `prefix` of most names, `blocks` before a block's number, and the tables of names."""

    prefix: str
    blocks: str
    outer: dict[str, str]
    inner: dict[str, str]
    dropped: str  # pattern of what holds no weights
    orders: dict[str, Order]


_ROTARY = Family(
    prefix="model.",
    blocks="layers",
    outer={"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"},
    inner={
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    },
    dropped=r"(model\.)?(layers\.[0-9]+\.self_attn\.)?rotary_emb\.inv_freq",
    orders={},
)
_LLAMA = replace(
    _ROTARY,
    inner={theirs: ours for theirs, ours in _ROTARY.inner.items() if not theirs.endswith("_norm")},
    orders={"attn_q": Order.HALVES, "attn_k": Order.HALVES},
)
_OLMO2 = replace(
    _ROTARY,
    inner={theirs: ours for theirs, ours in _ROTARY.inner.items() if not theirs.endswith("layernorm")}
    | {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"},
)
_GEMMA3 = replace(
    _ROTARY,
    inner=_ROTARY.inner
    | {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    orders=dict.fromkeys(
        (
            "attn_norm",
            "attn_q_norm",
            "attn_k_norm",
            "post_attention_norm",
            "ffn_norm",
            "post_ffw_norm",
            "output_norm",
        ),
        Order.LESS_ONE,
    ),
)
_PHI3 = replace(
    _ROTARY,
    inner={
        "input_layernorm": "attn_norm",
        "self_attn.qkv_proj": "attn_qkv",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    },
)
_GPT2 = Family(
    prefix="transformer.",
    blocks="h",
    outer={"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "lm_head": "output"},
    inner={
        "ln_1": "attn_norm",
        "attn.c_attn": "attn_qkv",
        "attn.c_proj": "attn_output",
        "ln_2": "ffn_norm",
        "mlp.c_fc": "ffn_up",
        "mlp.c_proj": "ffn_down",
    },
    dropped=r"(transformer\.)?h\.[0-9]+\.attn\.(masked_)?bias",
    orders=dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), Order.TRANSPOSED),
)
FAMILIES = {
    "llama": _LLAMA,
    "qwen2": _ROTARY,
    "qwen3": _ROTARY,
    "gpt2": _GPT2,
    "smollm3": _LLAMA,
    "granite": _LLAMA,
    "olmo2": _OLMO2,
    "gemma3": _GEMMA3,
    "phi3": _PHI3,
}


def to_gguf(arch: str, name: str) -> str | None:
    """The GGUF name of a tensor of a folder; None for one without weights. FileError for an unknown one."""
    family = FAMILIES[arch]
    if re.fullmatch(family.dropped, name):
        return None
    stem, _, kind = name.removeprefix(family.prefix).rpartition(".")
    block = re.fullmatch(rf"{family.blocks}\.(0|[1-9][0-9]{{,5}})\.(.+)", stem)
    found = family.inner.get(block[2]) if block else family.outer.get(stem)
    if found is None or kind not in ("weight", "bias"):
        raise FileError(f"tensor {show(name)} is not one of a {arch} model")
    return f"blk.{block[1]}.{found}.{kind}" if block else f"{found}.{kind}"


def from_gguf(arch: str, name: str) -> str:
    """The name in a folder of a GGUF tensor. FileError for an unknown one."""
    family = FAMILIES[arch]
    stem, _, kind = name.rpartition(".")
    block = re.fullmatch(r"blk\.([0-9]+)\.(.+)", stem)
    table = family.inner if block else family.outer
    theirs = next((theirs for theirs, ours in table.items() if ours == (block[2] if block else stem)), None)
    if theirs is None:
        raise FileError(f"tensor {show(name)} has no place in a Hugging Face {arch} model")
    if block:
        return f"{family.prefix}{family.blocks}.{block[1]}.{theirs}.{kind}"
    return f"{theirs}.{kind}" if theirs == "lm_head" else f"{family.prefix}{theirs}.{kind}"


def order_of(arch: str, name: str) -> Order:
    """The order of elements in a folder of the tensor that GGUF calls `name`."""
    stem, _, kind = name.rpartition(".")
    order = FAMILIES[arch].orders.get(stem.rpartition(".")[2], Order.SAME)
    return Order.SAME if order == Order.TRANSPOSED and kind == "bias" else order


def place_of(arch: str, name: str) -> tuple[int, int, int]:
    """Sorts GGUF names as they are computed: embedding, blocks by number, what follows them."""
    stem, _, kind = name.rpartition(".")
    block = re.fullmatch(r"blk\.([0-9]+)\.(.+)", stem)
    if block:
        return 1 + int(block[1]), list(FAMILIES[arch].inner.values()).index(block[2]), int(kind == "bias")
    outer = list(FAMILIES[arch].outer.values()).index(stem)
    return 0 if stem.endswith("embd") else 1 << 62, outer, int(kind == "bias")
