"""Converts the config.json of a Hugging Face folder to GGUF keys.

If a setting would change results and we do not support it, an error names it. Ignoring it would train a
different model. The keys are those that llama.cpp's converter writes.
"""

import json
from typing import Any

import numpy as np

from zero_mpi.checkpoint.huggingface import rope
from zero_mpi.checkpoint.huggingface.families import (
    FAMILIES,
    GGUF_NAMES,
    ROTARY_CLASSES,
    RotaryClass,
    Settings,
)
from zero_mpi.checkpoint.tensor_file import Metadata

SIZES = {  # GGUF key -> name in config.json
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "vocab_size": "vocab_size",
}
OPTIONAL = ("expert_shared_feed_forward_length",)  # 0 or missing: the model has no shared expert
SPELLINGS = {"num_experts": "num_local_experts"}  # setting -> its name in transformers 5
GPT2_SIZES = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "attention.head_count": "n_head",
    "vocab_size": "vocab_size",
}

# Settings that must be missing or have one of these values, because we support no others.
ONLY: dict[str, tuple[Any, ...]] = {"quantization_config": (None,), "is_causal": (None, True)}
ONLY_ROTARY = ONLY | {"use_bidirectional_attention": (None, False)}
ONLY_GPT2 = ONLY | {
    "activation_function": (None, "gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (None, True),
    "scale_attn_by_inverse_layer_idx": (None, False),
    "add_cross_attention": (None, False),
}

# Settings for dropout in Hugging Face's classes -> default rate.
DROPOUTS = {"gpt2": {"embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1}}
DROPOUTS_ROTARY = dict.fromkeys(("attention_dropout", "resid_pdrop", "embd_pdrop"), 0.0)


def architecture(settings: Settings) -> str:
    """Return the architecture that a config.json describes, as a key of `FAMILIES`."""
    types = {(arch in ROTARY_CLASSES and ROTARY_CLASSES[arch].model_type) or arch: arch for arch in FAMILIES}
    types |= {"mistral": "llama", "granitemoe": "granitemoe"}  # as in llama.cpp's converter
    model_type = settings.values.get("model_type")
    if not isinstance(model_type, str) or model_type not in types:
        raise settings.fault("model_type", f"one of {', '.join(types)}")
    return types[model_type]


def keys_of(arch: str, settings: Settings) -> Metadata:
    """Return the GGUF keys for a config.json, and a zero_mpi key for Llama 3 scaling, if the file sets it."""
    if arch == "gpt2":
        settings.only(ONLY_GPT2)
        keys: Metadata = {key: np.uint32(settings.size(name)) for key, name in GPT2_SIZES.items()}
        keys["feed_forward_length"] = np.uint32(settings.size("n_inner", 4 * settings.size("n_embd")))
        keys["attention.layer_norm_epsilon"] = np.float32(settings.number("layer_norm_epsilon", 1e-5))
    else:
        keys = rotary_keys(arch, settings)
    scaling = None if arch == "gpt2" else rope.llama3_settings(arch, settings)
    own = {} if scaling is None else {rope.ROPE_SCALING: json.dumps(scaling)}
    gguf = GGUF_NAMES.get(arch, arch)
    return {"general.architecture": gguf} | {f"{gguf}.{name}": value for name, value in keys.items()} | own


def rotary_keys(arch: str, settings: Settings) -> Metadata:
    """Return the keys of a rotary model, without their prefix, which is the architecture."""
    kind = ROTARY_CLASSES[arch]
    name, values = kind.activation
    settings.only({**ONLY_ROTARY, **kind.only, name: (None, *values)})
    layers = settings.values.get("no_rope_layers")
    every_fourth = isinstance(layers, list) and layers == [int(i % 4 != 3) for i in range(len(layers))]
    if layers is not None and not every_fourth:
        raise settings.fault("no_rope_layers", "1, 1, 1, 0, repeated")
    keys: Metadata = {key: np.uint32(settings.size(name)) for key, name in SIZES.items()}
    heads = settings.size("num_attention_heads")
    width = rope.head_width(arch, settings)
    if not kind.kv_heads and "num_key_value_heads" not in settings.values:
        raise settings.fault("num_key_value_heads", f"a number ({arch} has no default for it)")
    numbers = kind.numbers.items()
    keys |= {key: np.float32(settings.number(name, default)) for key, (name, default) in numbers}
    for key, name in kind.sizes.items():
        setting = name if name in settings.values else SPELLINGS.get(name, name)
        if settings.values.get(setting) or key not in OPTIONAL:
            keys[key] = np.uint32(settings.size(setting))
    context, rotary = settings.size("max_position_embeddings"), rope.rope_of(settings)
    return keys | {
        "attention.head_count_kv": np.uint32(settings.size("num_key_value_heads", heads)),
        "attention.layer_norm_rms_epsilon": np.float32(settings.number("rms_norm_eps", kind.epsilon)),
        "attention.key_length": np.uint32(width),
        "attention.value_length": np.uint32(width),
        "rope.dimension_count": np.uint32(rope.turned_width(width, rotary)),
        "rope.freq_base": np.float32(rotary.number("rope_theta", kind.theta)),
        **rope.scaling_keys(rotary, context),
        **(rope.longrope_keys(rotary, context) if kind.longrope else {}),
        **window_keys(kind, settings),
    }


def biases_of(arch: str, settings: Settings) -> set[str]:
    """Return a rotary block's projections with a bias; an empty set for gpt2, which needs all biases."""
    if arch == "gpt2":
        return set()
    kind = ROTARY_CLASSES[arch]
    biases = (projections for name, projections in kind.biases.items() if settings.flag(name, False))
    return set(kind.biased).union(*biases)


def all_full(kinds: Any, layers: int) -> bool:
    return isinstance(kinds, list) and len(kinds) == layers and set(map(str, kinds)) == {"full_attention"}


def window_keys(kind: RotaryClass, settings: Settings) -> Metadata:
    """Return the keys of sliding windows, without prefix; {} if the class has no blocks with a window."""
    if not kind.period:
        refuse_windows(settings)
        return {}
    layers, types = settings.size("num_hidden_layers"), settings.values.get("layer_types")
    width = score_width(
        settings.size("hidden_size"),
        settings.size("num_attention_heads"),
        layers,
        settings.size("head_dim", kind.head_dim),
    )
    if settings.size("query_pre_attn_scalar", 256) != width:
        raise settings.fault("query_pre_attn_scalar", f"{width}, the only supported value")
    if all_full(types, layers) or settings.values.get("sliding_window", 4096) is None:
        return {"attention.sliding_window": np.uint32(0)}
    count = len(types) if isinstance(types, list) else 0
    default = [rope.SLIDING if number % kind.period else rope.FULL for number in range(1, count + 1)]
    if types is not None and (count != layers or types != default):
        expected = f"{rope.FULL} in every {kind.period}th layer, {rope.SLIDING} in all others"
        raise settings.fault("layer_types", expected)
    return {"attention.sliding_window": np.uint32(settings.size("sliding_window", 4096))}


def score_width(width: int, heads: int, layers: int, head: int) -> int:
    """Return the number whose square root divides gemma3's scores: `head`, except with 62 layers."""
    return width // heads if layers == 62 else head


def refuse_windows(settings: Settings) -> None:
    """Raise FileError unless every layer attends to all earlier positions."""
    kinds = settings.values.get("layer_types")
    if kinds is not None and not all_full(kinds, settings.size("num_hidden_layers")):
        raise settings.fault("layer_types", "full_attention in every layer")
    window = settings.values.get("sliding_window", 4096)
    if settings.values.get("model_type") in ("phi3", "mistral", "mixtral"):
        context = settings.size("max_position_embeddings")
        if window is not None and settings.size("sliding_window", context) < context:
            raise settings.fault("sliding_window", f"null or at least {context} (llama.cpp has no window)")
    elif kinds is None and window is not None:
        settings.only({"use_sliding_window": (None, False)})
