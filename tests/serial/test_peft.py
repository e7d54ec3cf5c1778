"""PEFT folders that we write or read hold the same adapter in Hugging Face's form."""

import json
from dataclasses import replace

import hf_models
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_export import export
from test_llamacpp import BIASES, GPT, LLAMA, PROMPT, QWEN3, training_forward
from test_lora_files import written

from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.weights import open_adapter, open_merged
from zero_mpi.errors import UsageError
from zero_mpi.models.lora import LoRA

ALL, SOME = LoRA(3, 4.5), LoRA(2, 8.0, ("blk.1.ffn_*.weight", "blk.0.attn_[kq]*.weight"))
CASES = {
    "llama": (replace(LLAMA, biases=BIASES), ALL),
    "llama, some": (LLAMA, SOME),
    "qwen3": (QWEN3, SOME),
    "gpt2": (GPT, ALL),
}


@pytest.fixture(params=CASES)
def both(request, tmp_path):
    model, weights, base, adapter = written(tmp_path, *CASES[request.param])
    export(adapter, tmp_path / "peft", "--base", base)
    return model, weights, base, adapter, tmp_path / "peft"


def test_the_folder_s_products_are_the_adapter_in_hugging_face_s_terms(both, tmp_path):
    """Logits equal those of an independent forward with the base's matrices plus the adapter's products."""
    model, weights, base, _, folder = both
    export(base, tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    settings = json.loads((folder / "adapter_config.json").read_text())
    factors = load_file(folder / "adapter_model.safetensors")
    assert (settings["peft_type"], settings["task_type"], settings["bias"]) == ("LORA", "CAUSAL_LM", "none")
    assert settings["fan_in_fan_out"] == (model.arch == "gpt2")
    names = [f"base_model.model.{layer}" for layer in settings["target_modules"]]
    assert sorted(factors) == sorted(f"{name}.lora_{one}.weight" for name in names for one in "AB")
    for name, layer in zip(names, settings["target_modules"], strict=True):
        a, b = (factors[f"{name}.lora_{one}.weight"] for one in "AB")
        product = settings["lora_alpha"] / settings["r"] * b @ a
        tensors[f"{layer}.weight"] += product.T if settings["fan_in_fan_out"] else product
    ids = list(PROMPT)
    expected = hf_models.logits(config, tensors, ids)
    np.testing.assert_allclose(training_forward(model, weights, ids), expected, rtol=0, atol=1e-4)


def test_the_way_back_has_the_same_bits(both, tmp_path):
    model, weights, base, adapter, folder = both
    export(folder, tmp_path / "back.gguf", "--base", base)
    original, back = GGUFFile.open(adapter), GGUFFile.open(tmp_path / "back.gguf")
    start = open_adapter(folder, model)
    assert set(back.tensors) == set(original.tensors) == set(start.tensors)
    for name in original.tensors:
        assert np.array_equal(back.tensor(name), weights[name])
        assert np.array_equal(start.tensor(name), weights[name])
        for begin, end in ((0, 1), (3, weights[name].size - 1)):
            assert np.array_equal(start.read(name, begin, end), weights[name].reshape(-1)[begin:end])
    ours, theirs = open_merged(base, adapter), open_merged(base, folder)
    assert all(np.array_equal(ours.tensor(name), theirs.tensor(name)) for name in ours.tensors)


def test_half_precision_and_the_same_name_twice(tmp_path):
    _, _, base, adapter = written(tmp_path, LLAMA, SOME)
    export(adapter, tmp_path / "peft", "--base", base, "--type", "bf16")
    with pytest.raises(UsageError, match="--force"):
        export(adapter, tmp_path / "peft", "--base", base)
    export(adapter, tmp_path / "peft", "--base", base, "--type", "f16", "--force")
    actual, expected = (
        open_merged(base, path).tensor("blk.1.ffn_up.weight") for path in (tmp_path / "peft", adapter)
    )
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-3)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    _, _, base, adapter = written(folder, LLAMA, SOME)
    export(adapter, folder / "peft", "--base", base)
    return base, adapter, folder / "peft"


def changed(made, folder, settings):
    values = json.loads((made[2] / "adapter_config.json").read_text()) | settings
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(values))
    (folder / "adapter_model.safetensors").write_bytes((made[2] / "adapter_model.safetensors").read_bytes())
    return folder


EVA = {"init_lora_weights": "eva", "eva_config": {"rho": 2.0, "tau": 0.99}}  # keeps the base weights


def test_rslora_divides_by_the_root_of_the_rank(made, tmp_path):
    base, adapter, _ = made
    folder = changed(made, tmp_path / "peft", {"use_rslora": True, "lora_alpha": 8 / 2**0.5, **EVA})
    ours, theirs = open_merged(base, adapter), open_merged(base, folder)
    for name in ours.tensors:
        np.testing.assert_allclose(theirs.tensor(name), ours.tensor(name), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"use_dora": True}, "use_dora: True is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: "),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern: "),
        ({"a_new_idea": 1}, "a_new_idea: "),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: expected "),
        ({"peft_type": "IA3"}, r"peft_type: expected LORA \(only\)"),
        ({"r": 0}, "r: expected a number above 0"),
    ],
)
def test_what_is_not_the_plain_product_is_refused(settings, said, made, tmp_path):
    with pytest.raises(UsageError, match=f"adapter_config.json: {said}"):
        open_merged(made[0], changed(made, tmp_path / "peft", settings))


def test_other_tensors_and_missing_files_are_refused(made, tmp_path):
    folder = changed(made, tmp_path / "peft", {})
    file, factors = folder / "adapter_model.safetensors", load_file(made[2] / "adapter_model.safetensors")
    prefix, q = "base_model.model.", "model.layers.0.self_attn.q_proj.lora_B.weight"
    matrix = factors[prefix + q]
    for other, array, message in (
        ("lm_head.weight", matrix, "expected base_model.model.LAYER.lora_A"),
        ("model.layers.0.mlp.experts.lora_A.weight", matrix, "is not one of"),
        (q, matrix[:-1], "expected rows of the 4 heads of the base, found 23"),
    ):
        save_file(factors | {prefix + other: array}, file)
        with pytest.raises(UsageError, match=message):
            open_merged(made[0], folder)
    file.unlink()
    with pytest.raises(UsageError, match=r"expected adapter_model\.safetensors .*adapter_config\.json"):
        open_merged(made[0], folder)
    with pytest.raises(UsageError, match=r"contains adapter_config\.json"):
        export(folder, tmp_path / "x.gguf")


def test_an_adapter_is_written_beside_its_base_alone(made, tmp_path):
    base, adapter, folder = made
    other = written(tmp_path, GPT, ALL)[2]
    with pytest.raises(UsageError, match=r"is an adapter: .*--base"):
        export(adapter, tmp_path / "peft")
    with pytest.raises(UsageError, match=r"the model that it was trained on"):
        export(adapter, tmp_path / "peft", "--base", other)
    with pytest.raises(UsageError, match=f"--merge {adapter}: .*--base"):
        export(adapter, tmp_path / "peft", "--base", base, "--merge", adapter)
    with pytest.raises(UsageError, match=r"--type q8_0: .*--base"):
        export(folder, tmp_path / "small.gguf", "--base", base, "--type", "q8_0")
