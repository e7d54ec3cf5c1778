"""Table of Hugging Face's model classes: names and order of their tensors, and settings in config.json.

The table has one row for each class. The reader and the writer of folders use it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from zero_mpi.errors import FileError
from zero_mpi.files.foreign import quoted


class Settings:
    """Settings of a config.json. The methods check types and ranges. Errors name the setting."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def fault(self, name: str, expected: str) -> FileError:
        actual = quoted(self.values[name]) if name in self.values else "nothing"
        return FileError(f"{name}: expected {expected}, found {actual}")

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number above 0, or `default` if the setting is missing or null."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e18:
            raise self.fault(name, "a number above 0")
        return float(value)

    def size(self, name: str, default: int | None = None) -> int:
        """Return an integer from 1 to 2^31 - 1, or `default` if the setting is missing or null."""
        value = self.number(name, default)
        if value != int(value) or value >= 1 << 31:
            raise self.fault(name, "a whole number below 2^31")
        return int(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false, or `default` if the setting is missing or null."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.fault(name, "true or false")
        return value

    def only(self, allowed: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise FileError for the first setting that has a value we do not support."""
        for name, values in allowed.items():
            if self.values.get(name) not in values:
                raise self.fault(name, " or ".join(map(str, values[1:])) or "none")


class Order(Enum):
    """Order of the elements of a tensor in a Hugging Face folder, relative to GGUF's order."""

    SAME = "same"
    HALVES = "halves"  # in each head, first GGUF's rows with even numbers, then the odd ones
    TRANSPOSED = "transposed"
    LESS_ONE = "less one"  # GGUF's order; the folder stores the weights of norms minus 1


@dataclass(frozen=True)
class Names:
    """Names of a class's tensors: prefix of most names, word before a block's number, and name tables."""

    prefix: str
    blocks: str
    outer: dict[str, str]
    inner: dict[str, str]
    dropped: str  # pattern of the names of tensors that hold no weights
    orders: dict[str, Order]


_ROTARY = Names(
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
_MOE = replace(_ROTARY, inner=_ROTARY.inner | {"mlp.gate": "ffn_gate_inp"})
_MIXTRAL = replace(_LLAMA, inner=_LLAMA.inner | {"block_sparse_moe.gate": "ffn_gate_inp"})
_GRANITEMOE = replace(_LLAMA, inner=_LLAMA.inner | {"block_sparse_moe.router.layer": "ffn_gate_inp"})
GATE_UP, DOWN = ("ffn_gate_exps", "ffn_up_exps"), ("ffn_down_exps",)
# Tensors that join several matrices, one after the other; experts' tensors repeat this for each expert
JOINT = {"mlp.experts.gate_up_proj": GATE_UP, "mlp.experts.down_proj": DOWN}
JOINT_GRANITE = {
    "block_sparse_moe.input_linear": GATE_UP,
    "block_sparse_moe.output_linear": DOWN,
    "shared_mlp.input_linear": ("ffn_gate_shexp", "ffn_up_shexp"),
    "shared_mlp.output_linear": ("ffn_down_shexp",),
}
# Tensors of each expert
_SINGLE = {"gate_proj": GATE_UP[0], "up_proj": GATE_UP[1], "down_proj": DOWN[0]}
_SINGLE_MIXTRAL = {"w1": GATE_UP[0], "w3": GATE_UP[1], "w2": DOWN[0]}
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
    orders={
        f"{name}norm": Order.LESS_ONE
        for name in ("attn_", "attn_q_", "attn_k_", "post_attention_", "ffn_", "post_ffw_", "output_")
    },
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
_GPT2 = Names(
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

Biases = Mapping[str, frozenset[str]]
QKV = frozenset({"attn_q", "attn_k", "attn_v"})
ALL_BIASES: Biases = {
    "attention_bias": QKV | {"attn_output"},
    "mlp_bias": frozenset({"ffn_gate", "ffn_up", "ffn_down"}),
}
NO_ATTENTION_BIAS = {"attention_bias": (None, False)}
NO_BIASES = NO_ATTENTION_BIAS | {"mlp_bias": (None, False)}
NO_WINDOW = {"use_sliding_window": False}


@dataclass(frozen=True)
class RotaryClass:
    """One model class: the names of its tensors, and the defaults and limits of its settings."""

    names: Names
    name: str
    tied: bool = False  # this field and the next two are defaults of settings
    theta: float = 10000.0
    epsilon: float = 1e-6
    head_dim: int | None = None  # default of the setting; None: width / number of heads
    kv_heads: bool = True  # whether num_key_value_heads defaults to the number of heads
    biases: Biases = field(default_factory=dict)  # setting -> projections that have a bias if it is true
    biased: frozenset[str] = frozenset()  # projections that always have a bias
    # GGUF key -> (setting, default), for settings that are numbers
    numbers: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    # Settings that must be missing or have one of these values, in addition to `config.ONLY_ROTARY`
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)  # more settings that we write into config.json
    llama3: bool = False  # whether frequencies may be scaled as in Llama 3
    longrope: bool = False  # whether frequencies may be scaled as in Phi 3
    model_type: str = ""  # value of model_type; "": the architecture's name
    activation: tuple[str, tuple[str, ...]] = ("hidden_act", ("silu", "swish"))  # name and permitted values
    # GGUF key -> setting, for settings that are whole numbers
    sizes: Mapping[str, str] = field(default_factory=dict)
    # For a mixture of experts: name of their module, tensors of one expert, tensors that join all experts
    experts: tuple[str, dict[str, str], dict[str, tuple[str, ...]]] | None = None
    period: int = 0  # every period-th block has full attention, the others a window; 0: no window


EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
MULTIPLIERS = {
    "embedding_scale": ("embedding_multiplier", 1.0),
    "residual_scale": ("residual_multiplier", 1.0),
    "attention.scale": ("attention_multiplier", 1.0),
    "logit_scale": ("logits_scaling", 1.0),
}
ROTARY_CLASSES = {  # rotary models by architecture
    "llama": RotaryClass(_LLAMA, "LlamaForCausalLM", biases=ALL_BIASES, llama3=True),
    "qwen2": RotaryClass(_ROTARY, "Qwen2ForCausalLM", kv_heads=False, biased=QKV, written=NO_WINDOW),
    "qwen3": RotaryClass(
        _ROTARY, "Qwen3ForCausalLM", head_dim=128, kv_heads=False, only=NO_ATTENTION_BIAS, written=NO_WINDOW
    ),
    "smollm3": RotaryClass(
        _LLAMA,
        "SmolLM3ForCausalLM",
        tied=True,
        theta=2e6,
        kv_heads=False,
        only=NO_BIASES | {"no_rope_layer_interval": (None, 4)},
        written=NO_WINDOW | {"no_rope_layer_interval": 4},
    ),
    "olmo2": RotaryClass(_OLMO2, "Olmo2ForCausalLM", epsilon=1e-5, only=NO_ATTENTION_BIAS),
    "phi3": RotaryClass(_PHI3, "Phi3ForCausalLM", epsilon=1e-5, longrope=True),
    "gemma3": RotaryClass(
        _GEMMA3,
        "Gemma3ForCausalLM",
        tied=True,
        theta=1e6,
        head_dim=256,
        kv_heads=False,
        only=NO_BIASES
        | {
            "attn_logit_softcapping": (None,),
            "final_logit_softcapping": (None,),
            "rope_local_base_freq": (None, 10000.0),
            "sliding_window_pattern": (None, 6),
        },
        model_type="gemma3_text",
        activation=("hidden_activation", ("gelu_pytorch_tanh",)),
        period=6,
    ),
    "granite": RotaryClass(_LLAMA, "GraniteForCausalLM", biases=ALL_BIASES, llama3=True, numbers=MULTIPLIERS),
    "mixtral": RotaryClass(
        _MIXTRAL,
        "MixtralForCausalLM",
        theta=1e6,
        epsilon=1e-5,
        kv_heads=False,
        sizes=EXPERTS,
        experts=("block_sparse_moe", _SINGLE_MIXTRAL, JOINT),
    ),
    "qwen3moe": RotaryClass(
        _MOE,
        "Qwen3MoeForCausalLM",
        kv_heads=False,
        only=NO_ATTENTION_BIAS
        | {
            "norm_topk_prob": (True, True),  # the default is false
            "mlp_only_layers": (None, []),
            "decoder_sparse_step": (None, 1),
        },
        written=NO_WINDOW | {"norm_topk_prob": True},
        model_type="qwen3_moe",
        sizes=EXPERTS
        | {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"},
        experts=("mlp", _SINGLE, JOINT),
    ),
    "olmoe": RotaryClass(
        _MOE,
        "OlmoeForCausalLM",
        epsilon=1e-5,
        only=NO_ATTENTION_BIAS | {"norm_topk_prob": (None, False), "clip_qkv": (None,)},
        written={"norm_topk_prob": False},
        sizes=EXPERTS | {"expert_count": "num_experts"},
        experts=("mlp", _SINGLE, JOINT),
    ),
    "granitemoe": RotaryClass(
        _GRANITEMOE,
        "GraniteMoeSharedForCausalLM",
        only=NO_ATTENTION_BIAS,
        numbers=MULTIPLIERS,
        model_type="granitemoeshared",
        sizes=EXPERTS | {"expert_shared_feed_forward_length": "shared_intermediate_size"},
        experts=("", {}, JOINT_GRANITE),
    ),
}
FAMILIES = {arch: row.names for arch, row in ROTARY_CLASSES.items()} | {"gpt2": _GPT2}
MIXTURES = {arch: row.experts for arch, row in ROTARY_CLASSES.items() if row.experts}
GGUF_NAMES = {"mixtral": "llama"}  # family -> architecture in GGUF, if its name differs
