"""Configurations that are read and written agree with the configuration classes of transformers.

For each family and setting, the class completes config.json's settings, and NumPy code (`hf_models`) computes
the logits.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import hf_models
import numpy as np
import pytest
from test_huggingface import IDS, Edit, our_logits

from zero_mpi.checkpoint.huggingface.families import ROTARY_CLASSES
from zero_mpi.checkpoint.huggingface.folder import HuggingFaceFolder
from zero_mpi.commands.export.huggingface import config_json

transformers = pytest.importorskip("transformers", reason="no transformers: pip install transformers")
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

# Settings that do not change the model, and settings that are compared by their effects.
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
NOT_OF_THE_MODEL = {"_name_or_path", "architectures", "dtype", "transformers_version", *TOKENS}
IN_EFFECT = {"rope_theta", "rope_scaling", "original_max_position_embeddings"}
IN_EFFECT |= {"layer_types", "sliding_window", "use_sliding_window", "partial_rotary_factor"}
LINEAR = {"rope_type": "linear", "factor": 2.5}
LONG = hf_models.CONFIGS["phi3, long"]["rope_scaling"]
CASES: list[tuple[str, Edit]] = [(name, {}) for name in hf_models.CONFIGS]
LLAMA = ["num_key_value_heads", "rms_norm_eps", "rope_theta"]
# A missing setting gets the default of the class.
for family, optional in {
    "llama": [*LLAMA, "hidden_act"],
    "qwen2": ["rms_norm_eps", "hidden_act", "rope_theta"],
    "qwen3": ["rms_norm_eps", "hidden_act", "rope_theta", "head_dim", "tie_word_embeddings"],
    "smollm3": ["rms_norm_eps", "hidden_act", "rope_theta", "tie_word_embeddings"],
    "granite": [*hf_models.GRANITE, *LLAMA, "attention_bias", "mlp_bias"],
    "olmo2": LLAMA,
    "gemma3": ["rms_norm_eps", "hidden_activation", "rope_theta", "sliding_window", "tie_word_embeddings"],
    "mistral": ["rms_norm_eps", "hidden_act", "rope_theta", "head_dim"],
    "phi3": LLAMA,
    "phi3, long": ["original_max_position_embeddings"],
    "gpt2": ["n_inner", "layer_norm_epsilon"],
}.items():
    CASES += [(family, {name: ...}) for name in optional]
CASES += [
    ("gemma3", {"head_dim": ..., "query_pre_attn_scalar": ...}),
    ("gemma3", {"layer_types": ["full_attention"] * 7}),
    ("gemma3", {"rope_parameters": {"full_attention": {"rope_theta": 500.0, **LINEAR}}, "rope_theta": ...}),
    ("gemma3", {"rope_parameters": {"full_attention": {"factor": 8.0}}, "rope_scaling": LINEAR}),
    ("gemma3", {"rope_scaling": hf_models.YARN, "original_max_position_embeddings": 16}),
    ("llama", {"rope_parameters": {"rope_theta": 500.0, **LINEAR}}),
    ("llama", {"rope_parameters": {"rope_theta": 500.0, "factor": 3.0}, "rope_scaling": LINEAR}),
    ("llama", {"rope_scaling": {"type": "default"}}),
    ("llama", {"rope_parameters": LINEAR, "rope_scaling": {}}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 3}}),
    ("llama", {"rope_scaling": hf_models.YARN, "original_max_position_embeddings": 16}),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
    ("llama 3", {"original_max_position_embeddings": 8}),
    ("llama 3", {"rope_scaling": {k: v for k, v in hf_models.LLAMA3.items() if "original" not in k}}),
    ("granite", {"rope_scaling": hf_models.LLAMA3}),
    ("mistral", {"sliding_window": 32}),
    ("mistral", {"num_attention_heads": 16, "num_key_value_heads": ..., "head_dim": ..., "hidden_size": 64}),
    ("mistral", {"rope_scaling": hf_models.YARN}),
    ("mixtral", {"sliding_window": 32}),
    ("phi3", {"sliding_window": 32}),
    ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.4}, "partial_rotary_factor": 0.7}),
    ("phi3, partial", {"rope_scaling": LONG | {"long_factor": [1.5, 2.0], "short_factor": [1.0, 1.25]}}),
    ("phi3, long", {"original_max_position_embeddings": 32}),
    (
        "phi3, long",
        {"original_max_position_embeddings": 16, "rope_scaling": LONG | {"attention_factor": 1.25}},
    ),
    ("phi3, long", {"rope_scaling": LONG | {"factor": 3.0}}),
    ("phi3, long", {"rope_scaling": LONG | {"original_max_position_embeddings": 16}}),
    (
        "phi3, long",
        {"rope_scaling": {**LONG, "type": "su", "rope_type": ..., "original_max_position_embeddings": 8}},
    ),
    ("phi3, long", {"rope_scaling": LONG | {"rope_type": "yarn"}}),
    ("qwen2", {"layer_types": ["full_attention"] * 2, "use_sliding_window": True, "sliding_window": 4}),
    ("smollm3", {"no_rope_layers": [1, 1, 1, 0], "no_rope_layer_interval": 4}),
]


def class_of(folder: Path) -> Any:
    """Return the configuration of a folder as transformers' class reads and completes it."""
    config = transformers.AutoConfig.from_pretrained(folder)
    if config.model_type != "gpt2":
        config.standardize_rope_params()
    return config


def settings_of(config: Any) -> Edit:
    values = {key: value for key, value in config.to_dict().items() if key not in NOT_OF_THE_MODEL}
    rope = values.pop("rope_parameters", None)
    if rope is not None:
        rope = rope.get("full_attention", rope)
        values |= {"rope_theta": rope["rope_theta"], "rope_scaling": rope}
    return {key: value for key, value in values.items() if value is not None}


def effects(config: Edit) -> list[Any]:
    if config["model_type"] == "gpt2":
        return []
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    frequencies = [hf_models.frequencies(config, width, length) for length in (4, 12, 20, 30)]
    mask = [
        kind == "sliding_attention" and config["sliding_window"] for kind in config.get("layer_types", [])
    ]
    return [*frequencies, hf_models.magnitude(config), mask]


def content(source: Any) -> Any:
    constants = {name: array.tobytes() for name, array in source.constants.items()}
    return source.metadata, constants, {name: spec.shape for name, spec in source.tensors.items()}


def plain(value: Any) -> Any:
    return {k: plain(v) for k, v in value.items() if v is not ...} if isinstance(value, dict) else value


@pytest.mark.parametrize(("name", "edits"), CASES, ids=str)
def test_a_configuration_means_what_its_class_says(tmp_path, name, edits):
    config = plain(hf_models.CONFIGS[name] | edits)
    (tmp_path / "config.json").write_text(json.dumps(config))
    parsed = class_of(tmp_path)
    fields = settings_of(parsed)
    tensors = hf_models.random_tensors(fields)
    source = HuggingFaceFolder.open(hf_models.write_folder(tmp_path / "a", config, tensors))
    expected = hf_models.logits(fields, tensors, IDS)
    np.testing.assert_allclose(our_logits(source, IDS), expected, rtol=0, atol=1e-4)

    parsed.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert content(HuggingFaceFolder.open(hf_models.write_folder(tmp_path / "b", saved, tensors))) == content(
        source
    )

    folder = hf_models.write_folder(tmp_path / "c", config_json(source, "float32"), tensors)
    assert content(HuggingFaceFolder.open(folder)) == content(source)
    copy = settings_of(class_of(folder))
    fields["model_type"] = fields["model_type"].replace("mistral", "llama")  # both classes compute the same
    names = fields.keys() - IN_EFFECT
    assert {key: copy.get(key) for key in names} == {key: fields[key] for key in names}
    for actual, effect in zip(effects(copy), effects(fields), strict=True):
        np.testing.assert_allclose(actual, effect, rtol=1e-6)


@pytest.mark.parametrize("name", sorted(ROTARY_CLASSES | {"gpt2": None}))
def test_classes_types_and_special_tokens_are_those_of_transformers(tmp_path, name):
    config = hf_models.CONFIGS[name]
    folder = hf_models.write_folder(tmp_path / "a", config, hf_models.random_tensors(config))
    source = HuggingFaceFolder.open(folder)
    special = {f"tokenizer.ggml.{name}_token_id": np.uint32(3) for name in ("bos", "padding")}
    for ids, metadata in (((None, None, None), {}), ((3, None, 3), special)):
        fields = config_json(replace(source, metadata=source.metadata | metadata), "bfloat16")
        (tmp_path / "config.json").write_text(json.dumps(fields))
        parsed = class_of(tmp_path)
        assert tuple(getattr(parsed, token) for token in TOKENS) == ids
        assert str(parsed.dtype).removeprefix("torch.") == "bfloat16"
        assert parsed.architectures == [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[parsed.model_type]]
