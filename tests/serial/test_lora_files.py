"""llama.cpp gives our logits with adapter files, separate and merged; unsuitable files are refused."""

import json
from dataclasses import replace

import architectures
import numpy as np
import pytest
from oracles import llama_cpp, open_server
from test_llamacpp import (
    BIASES,
    GPT,
    LLAMA,
    MODELS,
    PREFIXES,
    PROMPT,
    QWEN2,
    QWEN3,
    log_softmax,
    next_token,
    random_weights,
    training_forward,
    write_model,
    write_tensors,
)

from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.weights import adapter_metadata, lora_of, open_adapter, open_merged, open_weights
from zero_mpi.commands.export.command import command
from zero_mpi.commands.inspect.examine import about_model
from zero_mpi.errors import UsageError
from zero_mpi.launch.world import World
from zero_mpi.models.lora import TARGETS, LoRA
from zero_mpi.nn.linear import is_adapter
from zero_mpi.train.text_model import TextModel

llama_cpp()  # skips the module without llama.cpp

ALL, SOME = LoRA(3, 4.5), LoRA(2, 8.0, ("blk.1.ffn_*.weight", "blk.0.attn_output.weight"))
CASES = {
    "llama": (LLAMA, ALL, 1e-4),
    "llama, tied, biases": (replace(LLAMA, tied=True, biases=BIASES), SOME, 1e-4),
    "llama, head": (LLAMA, LoRA(2, 8.0, ("output.weight", "blk.0.attn_q.weight")), 1e-4),
    "qwen2": (QWEN2, ALL, 1e-4),
    "qwen3": (QWEN3, SOME, 1e-4),
    "gpt2": (GPT, ALL, 2e-3),  # llama.cpp takes GELU from a table of 16-bit floats
}
CASES |= {
    arch: (MODELS[arch], ALL, 1e-4 if row.tolerance <= 1e-4 else 5e-3)
    for arch, row in architectures.ROWS.items()
    if arch not in CASES
}
EXPERTS = LoRA(3, 4.5, ("blk.*_exps.weight", "blk.*.ffn_gate_inp.weight", "blk.1.attn_q.weight"))
CASES |= {f"{arch}, experts": (MODELS[arch], EXPERTS, 1e-4) for arch in ("qwen3moe", "olmoe", "granitemoe")}
CASES["llama, experts"] = replace(LLAMA, expert_count=5, expert_used_count=2), EXPERTS, 1e-4


def written(folder, config, lora):
    model = replace(config, lora=lora)
    weights = random_weights(model)
    base = {name: array for name, array in weights.items() if not is_adapter(name)}
    factors = {name: array for name, array in weights.items() if is_adapter(name)}
    file = write_model(folder / "base.gguf", config, base)
    adapter = write_tensors(folder / "adapter.gguf", config.arch, adapter_metadata(lora), factors)
    return model, weights, file, adapter


@pytest.mark.parametrize("name", CASES)
def test_base_with_adapter_is_the_merged_model_and_llama_cpps(name, tmp_path):
    config, lora, tolerance = CASES[name]
    model, weights, base, adapter = written(tmp_path, config, lora)
    ids = list(PROMPT)
    trained = log_softmax(training_forward(model, weights, ids))
    merged = log_softmax(TextModel(open_merged(base, adapter)).logits(ids))
    others = log_softmax(TextModel(base, GGUFFile.open(adapter)).logits(ids))
    for actual in (merged, others):
        np.testing.assert_allclose(actual, trained, rtol=0, atol=1e-4)
    plain = log_softmax(TextModel(base).logits(ids))
    assert abs(plain - trained).max() > 0.3, "the adapter changes little"
    server = open_server(base, adapter)
    for count in PREFIXES:
        expected = next_token(server, ids[:count])
        np.testing.assert_allclose(trained[count - 1], expected, rtol=0, atol=tolerance)


def test_any_part_of_a_merged_matrix_is_read(tmp_path):
    _, weights, base, adapter = written(tmp_path, LLAMA, ALL)
    source, name = open_merged(base, tmp_path), "blk.1.ffn_down.weight"
    full = weights[name] + 1.5 * weights[f"{name}.lora_b"] @ weights[f"{name}.lora_a"]
    np.testing.assert_allclose(source.tensor(name), full, rtol=1e-5, atol=1e-6)
    for start, stop in ((0, 1), (5, 5), (96, 98), (1, full.size), (300, 411)):
        np.testing.assert_allclose(
            source.read(name, start, stop), full.reshape(-1)[start:stop], rtol=1e-5, atol=1e-6
        )
    assert source.tensor("output.weight").tobytes() == weights["output.weight"].tobytes()
    assert open_merged(base, None).tensors == open_weights(base).tensors
    assert lora_of(GGUFFile.open(adapter)).rank == 3


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt2"])
def test_an_adapter_of_a_tied_head_makes_a_head_of_its_own(arch, tmp_path):
    """The head is W + s b a, computed in NumPy; llama.cpp and a Hugging Face folder give the same logits."""
    config, rng = replace(MODELS[arch], tied=True), np.random.default_rng(1)
    weights = random_weights(config)
    base = write_model(tmp_path / "base.gguf", config, weights)
    shapes = (2, config.embedding_length), (config.vocab_size, 2)
    a, b = (rng.normal(0, 0.2, shape) for shape in shapes)
    factors = {"output.weight.lora_a": a.astype(np.float32), "output.weight.lora_b": b.astype(np.float32)}
    write_tensors(tmp_path / "adapter.gguf", config.arch, adapter_metadata(LoRA(2, 4.0)), factors)
    to_peft = [str(tmp_path / "adapter.gguf"), str(tmp_path / "peft"), "--base", str(base)]
    assert command(World(0, 1), to_peft) == 0
    for name in ("merged.gguf", "folder"):
        words = [str(base), str(tmp_path / name), "--merge", str(tmp_path / "peft")]
        assert command(World(0, 1), words) == 0
    merged = open_weights(tmp_path / "merged.gguf")
    head = weights["token_embd.weight"] + 2 * b @ a
    np.testing.assert_allclose(merged.tensor("output.weight"), head, rtol=1e-5, atol=1e-5)
    assert merged.tensor("token_embd.weight").tobytes() == weights["token_embd.weight"].tobytes()
    assert not json.loads((tmp_path / "folder" / "config.json").read_text())["tie_word_embeddings"]
    logits = TextModel(merged).logits(list(PROMPT))
    folder = TextModel(open_weights(tmp_path / "folder")).logits(list(PROMPT))
    np.testing.assert_allclose(folder, logits, rtol=0, atol=1e-4)
    expected = next_token(open_server(tmp_path / "merged.gguf"), list(PROMPT))
    np.testing.assert_allclose(log_softmax(logits)[-1], expected, rtol=0, atol=5e-3)


def test_a_merged_export_copies_the_tensors_that_the_adapter_does_not_change(tmp_path):
    """The blocks of the embedding, which contain only 1, would become others if they were quantized again."""
    _, weights, base, adapter = written(tmp_path, replace(LLAMA, embedding_length=32), SOME)
    file = tmp_path / "q.gguf"
    assert command(World(0, 1), [str(base), str(file), "--type", "q8_0"]) == 0
    raw = b"".join(GGUFFile.open(file).raw_chunks("token_embd.weight", 1000))
    ones = b"".join(raw[at : at + 2] + b"\1" * 32 for at in range(0, len(raw), 34))
    file.write_bytes(file.read_bytes().replace(raw, ones))
    words = [str(file), str(tmp_path / "merged.gguf"), "--type", "q8_0", "--merge", str(adapter)]
    assert command(World(0, 1), words) == 0
    before, after = GGUFFile.open(file), GGUFFile.open(tmp_path / "merged.gguf")
    for name in before.tensors:
        old, new = (b"".join(source.raw_chunks(name, 1000)) for source in (before, after))
        assert (old != new) == (f"{name}.lora_a" in weights), name


def test_an_adapter_that_does_not_fit_is_refused(tmp_path):
    model, weights, base, adapter = written(tmp_path, LLAMA, ALL)
    with pytest.raises(UsageError, match=r"adapter.gguf: has rank 3 and alpha 4.5; .*--lora 3 --lora-al"):
        open_adapter(adapter, replace(model, lora=LoRA(4, 4.5)))
    with pytest.raises(UsageError, match=r"has shape .*--lora-targets"):
        open_adapter(adapter, replace(model, lora=replace(ALL, targets=TARGETS[:1])))
    with pytest.raises(UsageError, match=r"expected an adapter .*general\.type adapter"):
        open_adapter(base, model)
    other = write_model(tmp_path / "other.gguf", GPT, random_weights(GPT))
    with pytest.raises(UsageError, match="the model that it was trained on"):
        open_merged(other, adapter)
    factors = {name: array for name, array in weights.items() if is_adapter(name)}
    keys = adapter_metadata(ALL)
    for lone in (f"blk.1.ffn_down.weight.lora_{end}" for end in "ab"):
        half = {name: array for name, array in factors.items() if name != lone}
        with pytest.raises(UsageError, match=r"half\.gguf: .*blk\.1\.ffn_down"):
            open_merged(base, write_tensors(tmp_path / "half.gguf", "llama", keys, half))
    activated = keys | {"adapter.alora.invocation_tokens": np.array([7], np.uint32)}
    path = write_tensors(tmp_path / "activated.gguf", "llama", activated, factors)
    with pytest.raises(UsageError, match=r"adapter\.alora\.invocation_tokens"):
        open_merged(base, path)
    assert "alora" in about_model(GGUFFile.open(path))["cannot_run"]
    (tmp_path / "run" / "latest").mkdir(parents=True)
    with pytest.raises(UsageError, match=f"{tmp_path}/run: .*{tmp_path}/run/latest"):
        open_merged(base, tmp_path / "run")


def test_an_alpha_of_0_means_a_scale_of_1_as_in_llama_cpp(tmp_path):
    _, weights, base, _ = written(tmp_path, LLAMA, ALL)
    factors = {name: array for name, array in weights.items() if is_adapter(name)}
    for alpha in (0.0, 3.0):
        keys = adapter_metadata(replace(ALL, alpha=alpha))
        write_tensors(tmp_path / f"{alpha}.gguf", "llama", keys, factors)
    merged, expected = (open_merged(base, tmp_path / f"{alpha}.gguf") for alpha in (0.0, 3.0))
    for name in merged.tensors:
        assert merged.tensor(name).tobytes() == expected.tensor(name).tobytes()


def test_a_folder_merged_with_an_adapter_keeps_its_tokenizer(tmp_path):
    _, _, base, adapter = written(tmp_path, MODELS["llama"], LoRA(2, 4.0))
    assert command(World(0, 1), [str(base), str(tmp_path / "folder")]) == 0
    words = [str(tmp_path / "folder"), str(tmp_path / "merged.gguf"), "--merge", str(adapter)]
    assert command(World(0, 1), words) == 0
    keys = GGUFFile.open(tmp_path / "merged.gguf").metadata
    assert keys["tokenizer.ggml.tokens"] == open_weights(base).metadata["tokenizer.ggml.tokens"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "folder" / name).write_text(name)
    words = [str(tmp_path / "folder"), str(tmp_path / "merged"), "--merge", str(adapter)]
    assert command(World(0, 1), words) == 0
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("folder", "merged")]
    assert configs[0] == configs[1]
    assert (tmp_path / "merged" / "tokenizer.json").read_text() == "tokenizer.json"
    assert (tmp_path / "merged" / "tokenizer_config.json").read_text() == "tokenizer_config.json"
