"""Reads rotary settings from config.json: width of a head, base of the frequencies, and their scaling.

GGUF has keys for linear scaling and for YaRN. It has no key for Llama 3's scaling, but a tensor of divisors,
`rope_freqs.weight`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from zero_mpi.checkpoint.huggingface.families import ROTARY_CLASSES, Settings
from zero_mpi.checkpoint.tensor_file import Metadata
from zero_mpi.errors import FileError
from zero_mpi.files.foreign import quoted
from zero_mpi.files.gguf_keys import GGUFKeys
from zero_mpi.files.parse import parse_json
from zero_mpi.ops.elementary import log, power

FULL, SLIDING = "full_attention", "sliding_attention"  # values of layer_types in config.json
MAX_HEAD = 1 << 14  # maximum width of a head; limits rotary tables, which are made before tensors are read
ROPE_SCALING = "zero_mpi.rope_scaling"  # key for Llama 3's settings, as JSON: the divisors do not show them
CONTEXT = "original_max_position_embeddings"  # context length without frequency scaling
CONTEXT_PHI3 = 4096  # Phi 3's default for this setting
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", CONTEXT)
SCALINGS = ("linear", "yarn")  # kinds of scaling that GGUF has keys for
LONGROPE, PARTIAL = "longrope", "partial_rotary_factor"
OLDER_LONGROPE = ("su", "yarn")  # former names of longrope in Phi 3's config.json
ROPE_FREQS = "rope_freqs.weight"
LONG_FACTORS = {  # tensor in a GGUF -> setting with its values
    "rope_factors_long.weight": "long_factor",
    "rope_factors_short.weight": "short_factor",
}
ONLY_YARN: dict[str, tuple[Any, ...]] = {
    "beta_fast": (None, 32),
    "beta_slow": (None, 1),
    "mscale": (None,),
    "mscale_all_dim": (None,),
    "truncate": (True, True),
}


def stored_scaling(metadata: Metadata) -> dict[str, Any] | None:
    """Return the settings that `config.keys_of` stored in a key; None if they are missing or invalid."""
    try:
        values = parse_json(GGUFKeys(metadata).text(ROPE_SCALING) or "null")
        return {name: values[name] for name in LLAMA3 if Settings(values).number(name)}
    except (FileError, ValueError, TypeError, KeyError, AttributeError):
        return None


def head_width(arch: str, settings: Settings) -> int:
    """Return the width of a head. Raise FileError for an odd width, because halves of heads are rotated."""
    default = settings.size("hidden_size") // settings.size("num_attention_heads")
    width = settings.size("head_dim", ROTARY_CLASSES[arch].head_dim or max(default, 1))
    if width > MAX_HEAD:
        raise FileError(f"head_dim: expected at most {MAX_HEAD}, found {width}")
    if width % 2:
        raise FileError(f"head_dim: expected an even width of heads, found {width}")
    return width


def turned_width(head: int, rope: Settings) -> int:
    """Return how many elements at the start of a head are rotated. Raise FileError for an odd number."""
    width = int(head * rope.number(PARTIAL, 1.0))
    if not 0 < width <= head or width % 2:
        raise FileError(f"{PARTIAL}: expected an even part of the width of a head, found {width} elements")
    return width


def of_one_kind(arch: str, settings: Settings) -> Settings:
    """Return the settings with a single set of rotary settings, that of the layers with full attention.

    The rotary settings of layers with a window must be gemma3's (base 10000, no scaling).
    Settings that a Mistral model leaves out get Mistral's defaults, which differ from llama's.
    """
    if settings.values.get("model_type") == "mistral":
        return Settings({"num_key_value_heads": 8, "sliding_window": 4096} | dict(settings.values))
    if arch != "gemma3":
        return settings
    parameters = object_of(settings, "rope_parameters")
    full, local = object_of(Settings(parameters), FULL), object_of(Settings(parameters), SLIDING)
    if parameters.keys() - {FULL, SLIDING}:
        raise settings.fault("rope_parameters", "an object for each kind of layer")
    Settings(local).only({"rope_theta": (None, 10000.0), "rope_type": (None, "default")})
    rope = full | object_of(settings, "rope_scaling")
    return Settings({**settings.values, "rope_parameters": rope, "rope_scaling": None, CONTEXT: None})


def object_of(settings: Settings, name: str) -> dict[str, Any]:
    """Return the JSON object in a setting; {} if the setting is missing or null."""
    value = settings.values.get(name)
    if value is not None and not isinstance(value, dict):
        raise settings.fault(name, "an object")
    return value or {}


def rope_of(settings: Settings) -> Settings:
    """Return base and scaling of the rotary frequencies, read in the newer or the older format.

    As in transformers, the older format takes precedence, and a top-level original context does too.
    `rope_type` is the kind of scaling; "default" stands for no scaling.
    """
    is_phi3 = settings.values.get("model_type") == "phi3"
    older, newer = (object_of(settings, name) for name in ("rope_scaling", "rope_parameters"))
    parameters = {name: settings.values.get(name) for name in ("rope_theta", PARTIAL)} | (older or newer)
    former, nested = settings.values.get(CONTEXT), parameters.get(CONTEXT)
    if former is None and is_phi3:
        former = CONTEXT_PHI3
        if nested not in (None, former):
            raise settings.fault(CONTEXT, f"{nested} also next to rope_scaling, where transformers reads it")
    has_objects = any(isinstance(value, dict) for value in parameters.values())
    if former is not None:
        parameters[CONTEXT] = former
    if not is_phi3:
        Settings(parameters).only({PARTIAL: (None, 1.0)})
    if has_objects:
        raise settings.fault("rope_parameters", "one setting for all layers")
    kind = parameters.get("rope_type", parameters.get("type"))
    if kind in OLDER_LONGROPE and is_phi3:
        kind = LONGROPE
    return Settings(parameters | {"rope_type": "default" if kind in (None, "none") else kind})


def scaling_keys(rope: Settings, context: int) -> Metadata:
    """Return the keys of linear scaling or YaRN, without prefix; {} for other kinds of scaling."""
    kind = rope.values["rope_type"]
    if kind not in SCALINGS:
        return {}
    factor = rope.number("factor")
    keys: Metadata = {"rope.scaling.type": kind, "rope.scaling.factor": np.float32(factor)}
    if kind == "linear":
        return keys
    Settings({"truncate": True} | dict(rope.values)).only(ONLY_YARN)
    default = 1.0 + 0.1 * log(max(factor, 1.0))
    if not math.isclose(rope.number("attention_factor", default), default, rel_tol=1e-6):
        raise rope.fault("attention_factor", f"{default:.6g}, the value that follows from the factor")
    return keys | {"rope.scaling.original_context_length": np.uint32(rope.size(CONTEXT, context))}


def longrope_keys(rope: Settings, context: int) -> Metadata:
    """Return the keys of Phi 3's scaling, without prefix: original context, and a factor for q and k."""
    if rope.values["rope_type"] != LONGROPE:
        return {}
    former = rope.size(CONTEXT)
    factor = rope.number("factor", context / former)
    default = 1.0 if factor <= 1 else math.sqrt(1 + log(factor) / log(max(former, 2)))
    keys: Metadata = {"rope.scaling.attn_factor": np.float32(rope.number("attention_factor", default))}
    return keys if former == context else keys | {"rope.scaling.original_context_length": np.uint32(former)}


def longrope_factors(rope: Settings, count: int) -> dict[str, npt.NDArray[np.float32]]:
    """Return Phi 3's two tensors of divisors by their names. Each has shape (count,)."""
    factors = {}
    for tensor, name in LONG_FACTORS.items():
        values = rope.values.get(name)
        if not isinstance(values, list) or len(values) != count:
            raise rope.fault(name, f"a list of {count} numbers")
        factors[tensor] = np.array([Settings({name: value}).number(name) for value in values], np.float32)
    return factors


def llama3_settings(arch: str, settings: Settings) -> dict[str, Any] | None:
    """Return the four numbers of Llama 3's scaling, as in the file; None for another supported scaling."""
    rope, family = rope_of(settings), ROTARY_CLASSES[arch]
    kind = rope.values["rope_type"]
    kinds = ("default", LONGROPE) if family.longrope else ("default", *SCALINGS)
    if kind in kinds:
        return None
    if kind != "llama3" or not family.llama3:
        expected = ", ".join((*kinds, "llama3") if family.llama3 else kinds)
        raise FileError(f"rope_type: expected {expected} (only), found {quoted(kind)}")
    values = Settings({CONTEXT: settings.values.get("max_position_embeddings")} | dict(rope.values))
    for name in LLAMA3:
        values.number(name)
    return {name: values.values[name] for name in LLAMA3}


def rope_factors(arch: str, settings: Settings) -> dict[str, npt.NDArray[np.float32]]:
    """Return tensor name -> divisors of frequencies (D / 2,); {} if keys describe any scaling."""
    if arch == "gpt2":
        return {}
    numbers, rope, width = llama3_settings(arch, settings), rope_of(settings), head_width(arch, settings)
    if rope.values["rope_type"] == LONGROPE:
        return longrope_factors(rope, turned_width(width, rope) // 2)
    if numbers is None:
        return {}
    base = rope.number("rope_theta", ROTARY_CLASSES[arch].theta)
    return {ROPE_FREQS: llama3_factors(base, width, **numbers)}


def llama3_factors(
    base: float,
    width: int,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> npt.NDArray[np.float32]:
    """Return the divisors of `width` / 2 frequencies: 1 for short waves, `factor` for long waves, and values
    that rise smoothly in between (Dubey et al., The Llama 3 Herd of Models, 2024)."""
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    context, steps = np.float32(original_max_position_embeddings), high_freq_factor - low_freq_factor
    with np.errstate(all="ignore"):  # the reader refuses invalid divisors later
        waves = np.float32(2 * np.pi) * power(np.float32(base), exponents).astype(np.float32)
        weight = (context / waves - np.float32(low_freq_factor)) / np.float32(steps or 1)
        blend = 1 / ((1 - weight) / np.float32(factor) + weight)
        out = np.where(waves > context / np.float32(low_freq_factor), np.float32(factor), blend)
        out = np.where(waves < context / np.float32(high_freq_factor), np.float32(1), out)
    return out.astype(np.float32)
