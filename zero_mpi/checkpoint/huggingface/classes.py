"""Default values and permitted values in config.json, for each of Hugging Face's classes of rotary models.

The table has one row for each class. The reader and the writer of folders use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zero_mpi.errors import FileError
from zero_mpi.files.foreign import quoted


class Settings:
    """Values of a config.json, which methods read with range checks. Errors name the setting."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def fault(self, name: str, expected: str) -> FileError:
        """Return an error for a setting whose value is not the expected one."""
        found = quoted(self.values[name]) if name in self.values else "nothing"
        return FileError(f"{name}: expected {expected}, found {found}")

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
                raise self.fault(name, f"{' or '.join(str(value) for value in values[1:]) or 'none'} (only)")


Biases = Mapping[str, frozenset[str]]
QKV = frozenset({"attn_q", "attn_k", "attn_v"})
ALL_BIASES: Biases = {
    "attention_bias": QKV | {"attn_output"},
    "mlp_bias": frozenset({"ffn_gate", "ffn_up", "ffn_down"}),
}
NO_BIASES = {"attention_bias": (None, False), "mlp_bias": (None, False)}
NO_WINDOW = {"use_sliding_window": False}


@dataclass(frozen=True)
class RotaryClass:
    """Defaults and limits of the settings for one model class."""

    name: str
    tied: bool = False  # defaults of settings: this field and the next two
    theta: float = 10000.0
    epsilon: float = 1e-6
    head_dim: int | None = None  # default of the setting; None: width / number of heads
    kv_heads: bool = True  # whether the number of heads is the default; otherwise the setting is required
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
    period: int = 0  # every period-th block has full attention and all others a window; 0: all full


EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
NO_ATTENTION_BIAS = {"attention_bias": (None, False)}
MULTIPLIERS = {
    "embedding_scale": ("embedding_multiplier", 1.0),
    "residual_scale": ("residual_multiplier", 1.0),
    "attention.scale": ("attention_multiplier", 1.0),
    "logit_scale": ("logits_scaling", 1.0),
}
ROTARY_CLASSES = {
    "mixtral": RotaryClass("MixtralForCausalLM", theta=1e6, epsilon=1e-5, kv_heads=False, sizes=EXPERTS),
    "qwen3moe": RotaryClass(
        "Qwen3MoeForCausalLM",
        kv_heads=False,
        only=NO_ATTENTION_BIAS
        | {
            "norm_topk_prob": (True, True),  # the class has the default false
            "mlp_only_layers": (None, []),
            "decoder_sparse_step": (None, 1),
        },
        written=NO_WINDOW | {"norm_topk_prob": True},
        model_type="qwen3_moe",
        sizes=EXPERTS
        | {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"},
    ),
    "olmoe": RotaryClass(
        "OlmoeForCausalLM",
        epsilon=1e-5,
        only=NO_ATTENTION_BIAS | {"norm_topk_prob": (None, False), "clip_qkv": (None,)},
        written={"norm_topk_prob": False},
        sizes=EXPERTS | {"expert_count": "num_experts"},
    ),
    "granitemoe": RotaryClass(
        "GraniteMoeSharedForCausalLM",
        only=NO_ATTENTION_BIAS,
        numbers=MULTIPLIERS,
        model_type="granitemoeshared",
        sizes=EXPERTS | {"expert_shared_feed_forward_length": "shared_intermediate_size"},
    ),
    "llama": RotaryClass("LlamaForCausalLM", biases=ALL_BIASES, llama3=True),
    "qwen2": RotaryClass("Qwen2ForCausalLM", kv_heads=False, biased=QKV, written=NO_WINDOW),
    "qwen3": RotaryClass(
        "Qwen3ForCausalLM",
        head_dim=128,
        kv_heads=False,
        only={"attention_bias": (None, False)},
        written=NO_WINDOW,
    ),
    "smollm3": RotaryClass(
        "SmolLM3ForCausalLM",
        tied=True,
        theta=2e6,
        kv_heads=False,
        only=NO_BIASES | {"no_rope_layer_interval": (None, 4)},
        written=NO_WINDOW | {"no_rope_layer_interval": 4},
    ),
    "olmo2": RotaryClass("Olmo2ForCausalLM", epsilon=1e-5, only={"attention_bias": (None, False)}),
    "phi3": RotaryClass("Phi3ForCausalLM", epsilon=1e-5, longrope=True),
    "gemma3": RotaryClass(
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
    "granite": RotaryClass("GraniteForCausalLM", biases=ALL_BIASES, llama3=True, numbers=MULTIPLIERS),
}
