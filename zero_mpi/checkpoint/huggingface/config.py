"""config.json of a Hugging Face folder as GGUF keys.

Whatever would change the result and is not computed here is refused by name: silence would train another
model. Keys are those that llama.cpp's converter writes. Llama-3's scaling of rotary frequencies is no key but
a tensor of divisors, `rope_freqs.weight`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from zero_mpi.checkpoint.gguf.index import Metadata
from zero_mpi.checkpoint.huggingface.names import FAMILIES
from zero_mpi.errors import FileError
from zero_mpi.files.foreign import quoted, shown
from zero_mpi.files.gguf_keys import GGUFKeys
from zero_mpi.files.parse import parse_json

SIZES = {  # GGUF key -> name in config.json
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "vocab_size": "vocab_size",
}
GPT2_SIZES = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "attention.head_count": "n_head",
    "vocab_size": "vocab_size",
}
MAX_HEAD = 1 << 14  # elements of a head; tables of its rotary positions are made before a tensor is read
ROPE_SCALING = "zero_mpi.rope_scaling"  # a key: Llama 3's settings as JSON, which its divisors do not tell
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

# What is computed whatever the configuration says: a setting may only say this, or be absent.
ONLY: dict[str, tuple[Any, ...]] = {"quantization_config": (None,), "is_causal": (None, True)}
ONLY_ROTARY = ONLY | {
    "hidden_act": (None, "silu", "swish"),
    "partial_rotary_factor": (None, 1.0),
    "use_bidirectional_attention": (None, False),
}
ONLY_GPT2 = ONLY | {
    "activation_function": (None, "gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (None, True),
    "scale_attn_by_inverse_layer_idx": (None, False),
    "add_cross_attention": (None, False),
}


# What is left out at random while Hugging Face trains, and how much where a configuration does not say.
DROPOUTS = {"gpt2": {"embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1}}
DROPOUTS_ROTARY = {"attention_dropout": 0.0}


class Settings:
    """The values of a config.json, read with their limits; errors name the setting."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def fault(self, name: str, expected: str) -> FileError:
        """The error for a setting that is not as expected."""
        found = quoted(self.values[name]) if name in self.values else "nothing"
        return FileError(f"{name}: expected {expected}, found {found}")

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0; `default` where it is absent or null."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e18:
            raise self.fault(name, "a number above 0")
        return float(value)

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number from 1 to 2^31; `default` where it is absent or null."""
        value = self.number(name, default)
        if value != int(value) or value >= 1 << 31:
            raise self.fault(name, "a whole number below 2^31")
        return int(value)

    def flag(self, name: str, default: bool) -> bool:
        """true or false; `default` where it is absent or null."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.fault(name, "true or false")
        return value

    def only(self, allowed: Mapping[str, tuple[Any, ...]]) -> None:
        """FileError for the first setting that asks for something else than what is computed."""
        for name, values in allowed.items():
            if self.values.get(name) not in values:
                raise self.fault(name, f"{' or '.join(str(value) for value in values[1:]) or 'none'} (only)")


def architecture(settings: Settings) -> str:
    """The GGUF name of the architecture."""
    arch = settings.values.get("model_type")
    if not isinstance(arch, str) or arch not in FAMILIES:
        raise settings.fault("model_type", f"one of {', '.join(FAMILIES)}")
    return arch


def is_tied(arch: str, settings: Settings) -> bool:
    """Whether the head is the embedding; each class has its own default."""
    return settings.flag("tie_word_embeddings", arch == "gpt2")


def dropout_of(arch: str, settings: Settings) -> str:
    """The kinds of dropout that a configuration asks for, such as "attn_pdrop 0.1"; empty where none."""
    usual = DROPOUTS.get(arch, DROPOUTS_ROTARY)
    asked = {name: settings.values.get(name, default) for name, default in usual.items()}
    return ", ".join(f"{name} {shown(value)}" for name, value in asked.items() if value)


def keys_of(arch: str, settings: Settings) -> Metadata:
    """The GGUF keys of a configuration; one of ours keeps what the divisors of frequencies were made from."""
    own = gpt2_keys(settings) if arch == "gpt2" else rotary_keys(arch, settings)
    scaling = llama3_settings(arch, settings)
    kept = {} if scaling is None else {ROPE_SCALING: json.dumps(scaling)}
    return {"general.architecture": arch} | {f"{arch}.{name}": value for name, value in own.items()} | kept


def kept_scaling(metadata: Metadata) -> dict[str, Any] | None:
    """The numbers that `keys_of` has kept; None where there are none, or none that can be meant."""
    try:
        values = parse_json(GGUFKeys(metadata).text(ROPE_SCALING) or "null")
        return {name: values[name] for name in LLAMA3 if Settings(values).number(name)}
    except (FileError, ValueError, TypeError, KeyError, AttributeError):
        return None


def gpt2_keys(settings: Settings) -> Metadata:
    """The keys of a gpt2 model, without the prefix."""
    settings.only(ONLY_GPT2)
    sizes = {key: np.uint32(settings.size(name)) for key, name in GPT2_SIZES.items()}
    hidden = np.uint32(settings.size("n_inner", 4 * settings.size("n_embd")))
    epsilon = np.float32(settings.number("layer_norm_epsilon", 1e-5))
    return sizes | {"feed_forward_length": hidden, "attention.layer_norm_epsilon": epsilon}


def rotary_keys(arch: str, settings: Settings) -> Metadata:
    """The keys of a llama, qwen2 or qwen3 model, without the prefix."""
    settings.only(ONLY_ROTARY)
    refuse_windows(settings)
    keys: Metadata = {key: np.uint32(settings.size(name)) for key, name in SIZES.items()}
    heads = settings.size("num_attention_heads")
    width = np.uint32(head_width(arch, settings))
    if arch != "llama" and "num_key_value_heads" not in settings.values:
        raise settings.fault("num_key_value_heads", "a number, since qwen's default is 32 whatever the heads")
    return keys | {
        "attention.head_count_kv": np.uint32(settings.size("num_key_value_heads", heads)),
        "attention.layer_norm_rms_epsilon": np.float32(settings.number("rms_norm_eps", 1e-6)),
        "attention.key_length": width,
        "attention.value_length": width,
        "rope.dimension_count": width,
        "rope.freq_base": np.float32(rope_of(settings).number("rope_theta", 10000.0)),
    }


def head_width(arch: str, settings: Settings) -> int:
    """Rows of q a head; halves of it are turned, so it is even."""
    usual = settings.size("hidden_size") // settings.size("num_attention_heads")
    width = settings.size("head_dim", 128 if arch == "qwen3" else max(usual, 1))
    if width > MAX_HEAD:
        raise FileError(f"head_dim: expected at most {MAX_HEAD}, found {width}")
    if width % 2:
        raise FileError(f"head_dim: expected an even width of heads, found {width}")
    return width


def biases_of(arch: str, settings: Settings) -> set[str]:
    """The projections of a block that have a bias. gpt2's are all needed and not asked for here."""
    if arch == "qwen3":
        settings.only({"attention_bias": (None, False)})
    attention = {"attn_q", "attn_k", "attn_v"} if arch == "qwen2" else set[str]()
    if arch == "llama" and settings.flag("attention_bias", False):
        attention = {"attn_q", "attn_k", "attn_v", "attn_output"}
    feed_forward = arch == "llama" and settings.flag("mlp_bias", False)
    return attention | ({"ffn_gate", "ffn_up", "ffn_down"} if feed_forward else set())


def all_full(kinds: Any, layers: int) -> bool:
    """Whether a list says of each layer that it attends to all positions; `layers` may be any number."""
    return isinstance(kinds, list) and len(kinds) == layers and set(map(str, kinds)) == {"full_attention"}


def refuse_windows(settings: Settings) -> None:
    """FileError for attention that does not reach back to the first position."""
    kinds = settings.values.get("layer_types")
    if kinds is not None and not all_full(kinds, settings.size("num_hidden_layers")):
        raise settings.fault("layer_types", "full_attention in every layer (only)")
    if kinds is None and settings.values.get("sliding_window", 4096) is not None:
        settings.only({"use_sliding_window": (None, False)})


def rope_of(settings: Settings) -> Settings:
    """Base and scaling of rotary positions, in the newer or the older spelling of a configuration."""
    found: dict[str, Any] = {"rope_theta": settings.values.get("rope_theta")}
    for name in ("rope_scaling", "rope_parameters"):
        value = settings.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise settings.fault(name, "an object")
        found |= value or {}
    rope = Settings(found)
    rope.only({"partial_rotary_factor": (None, 1.0)})
    if any(isinstance(value, dict) for value in found.values()):
        raise settings.fault("rope_parameters", "one setting for all layers (only)")
    return rope


def llama3_settings(arch: str, settings: Settings) -> dict[str, Any] | None:
    """The four numbers of Llama 3's scaling, as the file has them; None where frequencies are not scaled."""
    if arch == "gpt2":
        return None
    rope = rope_of(settings)
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind in ("default", "none", None):
        return None
    if kind != "llama3" or arch != "llama":
        raise FileError(f"rope_type: expected default, or llama3 for llama (only), found {quoted(kind)}")
    values = Settings({name: settings.values.get(name) for name in LLAMA3} | dict(rope.values))
    for name in LLAMA3:
        values.number(name)
    return {name: values.values[name] for name in LLAMA3}


def rope_factors(arch: str, settings: Settings) -> npt.NDArray[np.float32] | None:
    """The divisors of the rotary frequencies, (D / 2,); None where they are not scaled."""
    numbers = llama3_settings(arch, settings)
    if numbers is None:
        return None
    base = rope_of(settings).number("rope_theta", 10000.0)
    return llama3_factors(base, head_width(arch, settings), **numbers)


def llama3_factors(
    base: float,
    width: int,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> npt.NDArray[np.float32]:
    """Divisors of the `width` / 2 frequencies: 1 for short waves, `factor` for long ones, a smooth way in
    between (Dubey et al., The Llama 3 Herd of Models, 2024)."""
    with np.errstate(all="ignore"):  # odd settings make odd divisors, which are refused where they are read
        return _llama3_factors(
            base, width, factor, low_freq_factor, high_freq_factor, original_max_position_embeddings
        )


def _llama3_factors(
    base: float, width: int, factor: float, low_freq_factor: float, high_freq_factor: float, former: float
) -> npt.NDArray[np.float32]:
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    waves = np.float32(2 * np.pi) * np.float32(base) ** exponents
    context, steps = np.float32(former), high_freq_factor - low_freq_factor
    smooth = (context / waves - np.float32(low_freq_factor)) / np.float32(steps or 1)
    between = 1 / ((1 - smooth) / np.float32(factor) + smooth)
    out = np.where(waves > context / np.float32(low_freq_factor), np.float32(factor), between)
    return np.where(waves < context / np.float32(high_freq_factor), np.float32(1), out).astype(np.float32)
