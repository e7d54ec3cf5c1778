"""Exports have the expected bytes, llama.cpp opens them, and a failed export leaves nothing behind."""

import hashlib
import json
import os
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import bpe_files
import gguf
import hf_models
import numpy as np
import pytest
from chat_templates import CHATML, ZEPHYR, chat_keys
from gguf_files import random_weights, write_raw, write_tensors
from jobs import run_command
from oracles import greedy, open_server, tokenize

from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.huggingface import names as tables
from zero_mpi.checkpoint.mixes import FILE_TYPES
from zero_mpi.checkpoint.weights import open_weights
from zero_mpi.commands.export.command import command
from zero_mpi.data import BPETokenizer, ByteTokenizer
from zero_mpi.errors import JobError, UsageError
from zero_mpi.launch.world import World
from zero_mpi.models import GPT2, Llama, ModelConfig
from zero_mpi.train.text_model import TextModel

NO_TOKENIZERS = "no tokenizers to write tokenizer.json with: pip install tokenizers"
Kind = gguf.GGMLQuantizationType
SIZES: dict[str, Any] = {"vocab_size": ByteTokenizer.vocab_size, "context_length": 32, "embedding_length": 64}
SIZES |= {"block_count": 2, "head_count": 4}
HEADS: dict[str, Any] = {"head_count_kv": 2, "key_length": 16, "value_length": 16}
LLAMA = Llama(**SIZES, **HEADS, feed_forward_length=97, tied=False)
GPT = GPT2(**SIZES, feed_forward_length=128, tied=True)
MODELS = {"llama": LLAMA, "gpt2": GPT}
TRAINING = {"training.iteration_count": np.uint64(7), "training.token_count": np.uint64(99)}
TRAINING |= {"training.checkpoint_id": "x", "training.tensor_digests": ["y token_embd.weight"]}
TRAINING |= {"training.state_digest": "z"}


def weights_of(config: ModelConfig) -> dict[str, np.ndarray]:
    weights = random_weights(config)
    head = weights.get("output.weight")
    if head is not None:
        head[:32] = head[127:] = 0
    return weights


def write_model(path: Path, config: ModelConfig, extra: dict[str, Any] | None = None) -> Path:
    metadata = config.metadata() | ByteTokenizer().metadata() | (extra or {})
    return write_tensors(path, config.arch, metadata, weights_of(config))


def export(*arguments: Any) -> None:
    assert command(World(0, 1), [str(argument) for argument in arguments]) == 0


def stored(path: Path) -> dict[str, bytes]:
    file = GGUFFile.open(path)
    return {name: b"".join(file.raw_chunks(name, 1000)) for name in file.tensors}


def expected_kind(name: str, array: np.ndarray, target: str, pure: bool = False) -> Kind:
    if array.ndim < 2 or name in ("position_embd.weight", "rope_freqs.weight"):
        return Kind.F32
    if name in ("token_embd.weight", "output.weight") and target[:2] in ("q4", "q5") and not pure:
        return Kind.Q8_0
    return Kind.F16 if target.startswith("q") and array.shape[1] % 32 else Kind[target.upper()]


@pytest.mark.parametrize("wanted", FILE_TYPES)
@pytest.mark.parametrize("pure", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_stored_bits_are_those_of_the_gguf_package(tmp_path, name, pure, wanted):
    """Quantized exports store rows of 97 elements (llama's ffn_down) as F16: no block size divides 97."""
    source = write_model(tmp_path / "m.gguf", MODELS[name])
    export(source, tmp_path / "x.gguf", "--type", wanted, *(["--pure"] * pure))
    file, bits = GGUFFile.open(tmp_path / "x.gguf"), stored(tmp_path / "x.gguf")
    assert list(bits) == list(GGUFFile.open(source).tensors)
    for key, array in weights_of(MODELS[name]).items():
        kind = expected_kind(key, array, wanted, pure)
        assert file.tensors[key].type is kind, key
        assert bits[key] == gguf.quants.quantize(array, kind).tobytes(), key
    kinds = {info.type.name for info in file.tensors.values()}
    finer = {"Q8_0"} if wanted[:2] in ("q4", "q5") and not pure else set()
    fallen = {"F16"} if wanted[0] == "q" and name == "llama" else set()
    assert kinds == {"F32", wanted.upper()} | finer | fallen


@pytest.mark.parametrize("wanted", FILE_TYPES)
def test_keys_are_carried_over_but_for_what_is_no_longer_true(tmp_path, wanted):
    extra = TRAINING | {"general.name": "mine", "general.file_type": np.uint32(77), "my.key": np.int8(-3)}
    source = write_model(tmp_path / "m.gguf", LLAMA, extra)
    export(source, tmp_path / "x.gguf", "--type", wanted)
    before, after = GGUFFile.open(source).metadata, GGUFFile.open(tmp_path / "x.gguf").metadata
    gone = {"training.checkpoint_id", "training.tensor_digests", "training.state_digest"}
    new = {"general.quantization_version"} if wanted.startswith("q") else set()
    assert set(after) == set(before) - gone | new
    for key in set(after) - new - {"general.file_type"}:
        assert type(after[key]) is type(before[key])
        np.testing.assert_array_equal(after[key], before[key])
    types = {"f32": 0, "f16": 1, "bf16": 32, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9}
    assert after["general.file_type"] == np.uint32(types[wanted])
    assert not new or after["general.quantization_version"] == np.uint32(2)


def test_what_has_the_type_already_is_copied(tmp_path):
    """Quantizing a tensor a second time would change bits."""
    export(write_model(tmp_path / "m.gguf", LLAMA), tmp_path / "once.gguf", "--type", "q4_0")
    export(tmp_path / "once.gguf", tmp_path / "twice.gguf", "--type", "q4_0")
    assert (tmp_path / "once.gguf").read_bytes() == (tmp_path / "twice.gguf").read_bytes()
    export(tmp_path / "once.gguf", tmp_path / "wide.gguf")
    for name, values in stored(tmp_path / "wide.gguf").items():
        assert values == GGUFFile.open(tmp_path / "once.gguf").tensor(name).tobytes()


@pytest.mark.parametrize(
    ("format", "wanted"),
    [("gguf", "f32"), ("gguf", "f16"), ("gguf", "q5_1"), ("safetensors", "f32"), ("safetensors", "bf16")],
)
def test_memory_does_not_grow_with_the_model(tmp_path, format, wanted):
    """Exporting an embedding of 64 MiB takes less than 12 MiB of memory."""
    sizes = {"layers": 1, "dim": 64, "heads": 2, "context": 8, "vocab_size": 1 << 18, "tied": True}
    config = Llama.from_flags(sizes)
    ones = {name: np.ones(param.shape, np.float32) for name, param in config.params().items()}
    write_tensors(tmp_path / "m.gguf", "llama", config.metadata(), ones)
    tracemalloc.start()
    export(tmp_path / "m.gguf", tmp_path / "x", "--type", wanted, "--format", format)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12 << 20


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
@pytest.mark.parametrize("name", hf_models.CONFIGS)
def test_a_folder_becomes_a_gguf_and_a_folder_again(tmp_path, monkeypatch, name, shard):
    if shard == "20KB":
        monkeypatch.setattr(tables, "CHUNK", 40)
    config, tensors = hf_models.CONFIGS[name], hf_models.random_tensors(hf_models.CONFIGS[name])
    hf_models.write_folder(tmp_path / "hf", config, tensors)
    export(tmp_path / "hf", tmp_path / "m.gguf")
    export(tmp_path / "m.gguf", tmp_path / "back", "--shard-size", shard)
    source, copy = open_weights(tmp_path / "hf"), open_weights(tmp_path / "back")
    assert list(source.tensors) == list(copy.tensors)
    for key in source.tensors:
        if key != "rope_freqs.weight":
            assert source.tensor(key).tobytes() == copy.tensor(key).tobytes()
    assert source.metadata == copy.metadata
    files = sorted(tmp_path.glob("back/*.safetensors"))
    assert len(files) > 1 if shard == "20KB" else [file.name for file in files] == ["model.safetensors"]
    largest = max(np.prod(shape) for shape in hf_models.shapes(config).values())
    assert max(file.stat().st_size for file in files) < max(20_000, 4 * largest) + 4000 or shard == "5GB"


@pytest.mark.parametrize(("wanted", "dtype"), [("f16", np.float16), ("bf16", None), ("f32", np.float32)])
def test_the_tensors_of_a_folder_have_the_type(tmp_path, wanted, dtype):
    safetensors = pytest.importorskip("safetensors.numpy")
    import ml_dtypes

    export(write_model(tmp_path / "m.gguf", GPT), tmp_path / "hf", "--type", wanted)
    tensors = safetensors.load_file(tmp_path / "hf" / "model.safetensors")
    for array in tensors.values():
        assert array.dtype == (dtype or ml_dtypes.bfloat16)
    up = weights_of(GPT)["blk.1.ffn_up.weight"].T.astype(dtype or ml_dtypes.bfloat16)
    assert tensors["transformer.h.1.mlp.c_fc.weight"].tobytes() == np.ascontiguousarray(up).tobytes()
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["torch_dtype"] == {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}[wanted]
    assert (config["bos_token_id"], config["eos_token_id"]) == (256, 257)


def test_the_tokenizer_goes_along(tmp_path):
    pytest.importorskip("tokenizers", reason=NO_TOKENIZERS)
    export(write_model(tmp_path / "m.gguf", LLAMA), tmp_path / "hf")
    assert (tmp_path / "hf" / "tokenizer.json").stat().st_size > 1000
    export(tmp_path / "hf", tmp_path / "back.gguf")
    keys = GGUFFile.open(tmp_path / "back.gguf").metadata
    assert keys["tokenizer.ggml.tokens"] == ByteTokenizer().metadata()["tokenizer.ggml.tokens"]
    export(tmp_path / "hf", tmp_path / "again")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


def test_rules_of_a_tokenizer_go_along_and_a_gguf_brings_a_warning(tmp_path):
    pytest.importorskip("tokenizers", reason=NO_TOKENIZERS)
    config = hf_models.CONFIGS["llama"] | {"vocab_size": 320}
    hf_models.write_folder(tmp_path / "hf", config, hf_models.random_tensors(config))
    content = bpe_files.trained_json("gpt-2", tokens=300) | {"normalizer": {"type": "NFC"}}
    bpe_files.write_json(tmp_path / "plain", content | {"normalizer": None})
    for token in content["added_tokens"]:
        token |= {"rstrip": True}
    bpe_files.write_json(tmp_path / "hf", content)
    status, _, err = run("hf", "m.gguf", cwd=tmp_path)
    assert (status, err.count("\n")) == (0, 1)
    assert all(name in err for name in ("llama.cpp", "rstrip", "NFC"))
    export(tmp_path / "m.gguf", tmp_path / "back")
    rules = json.loads((tmp_path / "back" / "tokenizer.json").read_text())
    assert rules["normalizer"] == {"type": "NFC"}
    assert all(token["rstrip"] for token in rules["added_tokens"])
    (tmp_path / "plain" / "tokenizer.json").replace(tmp_path / "hf" / "tokenizer.json")
    assert run("hf", "x.gguf", cwd=tmp_path)[::2] == (0, "")


def test_a_tokenizer_that_does_not_go_along_brings_a_warning(tmp_path, capsys):
    config = hf_models.CONFIGS["llama"]
    hf_models.write_folder(tmp_path / "hf", config, hf_models.random_tensors(config))
    export(tmp_path / "hf", tmp_path / "plain.gguf")
    assert capsys.readouterr().err == ""
    (tmp_path / "hf" / "tokenizer.model").touch()
    write_model(tmp_path / "sp.gguf", LLAMA, {"tokenizer.ggml.model": "llama"})
    for source, target, named in (("hf", "m.gguf", "hf/tokenizer.model"), ("sp.gguf", "back", "sp.gguf")):
        export(tmp_path / source, tmp_path / target)
        err = capsys.readouterr().err
        assert (err.count("\n"), named in err) == (1, True)


def test_named_templates_of_a_folder_go_along(tmp_path):
    """Transformers reads the same templates from the folder, a copy, and a copy made through GGUF."""
    transformers = pytest.importorskip("transformers")
    config = hf_models.CONFIGS["llama"] | {"vocab_size": 320}
    hf_models.write_folder(tmp_path / "hf", config, hf_models.random_tensors(config))
    bpe_files.write_json(tmp_path / "hf", bpe_files.trained_json("gpt-2", tokens=300))
    (tmp_path / "hf/tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "OLD"})
    )
    folder = tmp_path / "hf/additional_chat_templates"
    folder.mkdir()
    for path, text in (
        (tmp_path / "hf/chat_template.jinja", "NEW"),
        (folder / "tool_use.jinja", "T"),
        (folder / "rag.jinja", "R"),
    ):
        path.write_text(text)
    export(tmp_path / "hf", tmp_path / "copy")
    export(tmp_path / "hf", tmp_path / "m.gguf")
    export(tmp_path / "m.gguf", tmp_path / "back")
    for name in ("hf", "copy", "back"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert tokenizer.chat_template == {"default": "NEW", "tool_use": "T", "rag": "R"}, name


@pytest.mark.parametrize("rows", [308, 320, 300])
def test_a_folder_may_have_more_rows_than_tokens_and_not_less(tmp_path, rows):
    """llama.cpp opens the export; text is never encoded as a padding token."""
    pytest.importorskip("tokenizers", reason=NO_TOKENIZERS)
    config = hf_models.CONFIGS["llama"] | {"vocab_size": rows}
    hf_models.write_folder(tmp_path / "hf", config, hf_models.random_tensors(config))
    bpe_files.write_json(tmp_path / "hf", bpe_files.trained_json("gpt-2", tokens=300))
    status, _, err = run("hf", "m.gguf", cwd=tmp_path)
    if rows < 308:
        assert (status, err.count("\n"), "308" in err, "300" in err) == (2, 1, True, True)
        return
    export(tmp_path / "m.gguf", tmp_path / "back")
    tokenizer = BPETokenizer(GGUFFile.open(tmp_path / "m.gguf").metadata)
    assert (tokenizer.vocab_size, tokenizer.tokens[rows - 1] == "[PAD319]") == (rows, rows == 320)
    assert tokenizer.encode("[PAD319]", special=True).max() < 300
    assert json.loads((tmp_path / "back" / "config.json").read_text())["vocab_size"] == rows
    assert "[PAD319]" not in json.loads((tmp_path / "back" / "tokenizer.json").read_text())["model"]["vocab"]
    assert tokenize(open_server(tmp_path / "m.gguf"), "a b") == tokenizer.encode("a b").tolist()


OWN = CHATML.replace("<|im_end|>", "<|user|>")  # a template with an unusual end-of-turn token
SPELT = CHATML.replace("<|im_end|>", "#END#")
EOT, EOM = (f"tokenizer.ggml.{name}_token_id" for name in ("eot", "eom"))


@pytest.mark.parametrize(
    ("template", "keys", "eot", "eom"),
    [
        (CHATML, {}, "<|im_end|>", None),
        (OWN, {}, "<|user|>", None),
        (OWN, {EOT: "<|system|>"}, "<|system|>", "<|user|>"),
        (ZEPHYR, {}, None, None),
        (SPELT, {}, None, None),
        ("{% for", {}, None, None),
        (None, {EOT: "<|system|>"}, "<|system|>", None),
    ],
)
def test_an_export_names_the_tokens_that_end_an_answer(tmp_path, template, keys, eot, eom):
    """A folder's EOS ids are EOS, the end tokens of template and keys, and tokens of llama.cpp's list."""
    all_keys: Any = chat_keys(template)
    ids = {token: place for place, token in enumerate(all_keys["tokenizer.ggml.tokens"])}
    all_keys |= {name: np.uint32(ids[token]) for name, token in keys.items()}
    source = bpe_files.write_model(tmp_path / "m.gguf", all_keys)
    export(source, tmp_path / "x.gguf")
    metadata = GGUFFile.open(tmp_path / "x.gguf").metadata
    assert [metadata.get(EOT), metadata.get(EOM)] == [ids.get(eot or ""), ids.get(eom or "")]
    export(source, tmp_path / "hf")
    tokens = {"<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", eot, eom} - {None}
    ends = [ids["</s>"], *sorted(ids[token] for token in tokens)]
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "hf" / name).read_text())["eos_token_id"] == ends


@pytest.mark.parametrize("ends", [[903, 904], [904, 902, 903], 904, [904]])
def test_all_ends_of_a_folder_come_back(tmp_path, ends):
    """Tokens 902 and 904 end an answer only because of these settings, token 903 because of its text."""
    config = hf_models.CONFIGS["llama"] | {"vocab_size": 908, "eos_token_id": ends}
    hf_models.write_folder(tmp_path / "hf", config, hf_models.random_tensors(config))
    bpe_files.write_json(tmp_path / "hf", bpe_files.trained_json("gpt-2"))
    export(tmp_path / "hf", tmp_path / "m.gguf")
    export(tmp_path / "m.gguf", tmp_path / "back")
    export(tmp_path / "back", tmp_path / "again")
    expected = ends if isinstance(ends, list) else [ends]
    for name in ("back/config.json", "back/generation_config.json", "again/config.json"):
        ids = json.loads((tmp_path / name).read_text())["eos_token_id"]
        assert (ids[0], set(ids)) == (expected[0], {*expected, 903})


@pytest.mark.parametrize("wanted", FILE_TYPES)
def test_llama_cpp_opens_every_type_and_generates(tmp_path, wanted):
    source = write_model(tmp_path / "m.gguf", LLAMA)
    export(source, tmp_path / "x.gguf", "--type", wanted)
    ours = bytes(TextModel(source).generate(list(b"def "), 12, temperature=0)).decode()
    theirs = greedy(open_server(tmp_path / "x.gguf"), "def ", 12)
    assert len(theirs) == 12
    if wanted in ("f32", "f16"):
        assert theirs == ours


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_is_there_stays_unless_forced(tmp_path, monkeypatch):
    source = write_model(tmp_path / "m.gguf", LLAMA)
    (tmp_path / "x.gguf").write_bytes(b"mine")
    export(source, tmp_path / "hf")
    for name in ("x.gguf", "hf"):
        with pytest.raises(UsageError, match=f"{name}: .*--force"):
            export(source, tmp_path / name)
    assert (tmp_path / "x.gguf").read_bytes() == b"mine"
    export(source, tmp_path / "x.gguf", "--force")
    assert stored(tmp_path / "x.gguf") == stored(source)
    export(source, tmp_path / "hf", "--force", "--type", "f16", "--shard-size", "100KB")
    assert open_weights(tmp_path / "hf").tensors["output.weight"].type is Kind.F16
    assert not (tmp_path / "hf" / "model.safetensors").exists()
    (tmp_path / "empty").mkdir()
    export(source, tmp_path / "empty")
    monkeypatch.chdir(tmp_path / "hf")
    for name in (".", "../hf"):
        with pytest.raises(UsageError):
            export(source, name, "--force")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "hf", "m.gguf", "x.gguf"]


def test_force_does_not_remove_what_is_no_model(tmp_path):
    source = write_model(tmp_path / "m.gguf", LLAMA)
    for name in ("mine", "x.gguf"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    os.mkfifo(tmp_path / "pipe.gguf")
    for name, message in (("mine", r"'thesis\.txt'"), ("x.gguf", "folder"), ("pipe.gguf", "--force")):
        with pytest.raises(UsageError, match=message):
            export(source, tmp_path / name, "--force")
    assert (tmp_path / "mine" / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["m.gguf", "x", "--type", "q4_0"], "--type q4_0: "),
        (["m.gguf", "none/x.gguf"], "none"),
        (["m.gguf", "x", "--shard-size", "5 bananas"], "--shard-size 5 bananas: "),
        (["m.gguf", "x.gguf", "--type", "q7_k"], "'q7_k'"),
        (["m.gguf", "x", "--split-size", "1GB"], "--split-size 1GB: "),
        (["m.gguf", "x.gguf", "--imatrix", "m.gguf"], "m.gguf: "),
        (["state.gguf", "x.gguf"], "model.gguf"),
    ],
)
def test_bad_usage_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, arguments, named):
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "m.gguf", LLAMA)
    write_raw(tmp_path / "state.gguf", "zero_mpi", {}, [])
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(UsageError) as caught:
        export(*arguments)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    ("value", "wanted", "target"),
    [
        (1e6, "f16", "x.gguf"),
        (np.nan, "q4_0", "x.gguf"),
        (np.inf, "f16", "x"),
        (3.4028235e38, "bf16", "x"),
        (3e38, "q8_0", "x.gguf"),
        (-3e38, "q4_1", "x.gguf"),
    ],
)
def test_numbers_that_a_type_cannot_hold_are_refused(tmp_path, value, wanted, target):
    weights = weights_of(LLAMA)
    weights["blk.0.attn_q.weight"][3, 3] = value
    write_tensors(tmp_path / "m.gguf", "llama", LLAMA.metadata(), weights)
    with pytest.raises(UsageError, match=r"tensor 'blk\.0\.attn_q\.weight'"):
        export(tmp_path / "m.gguf", tmp_path / target, "--type", wanted)
    assert os.listdir(tmp_path) == ["m.gguf"]


@pytest.mark.parametrize("wanted", [name for name in FILE_TYPES if name.startswith("q")])
def test_tiny_numbers_become_zero(tmp_path, wanted):
    weights = weights_of(LLAMA)
    weights["token_embd.weight"][3] *= np.float32(1e-38)
    write_tensors(tmp_path / "m.gguf", "llama", LLAMA.metadata(), weights)
    export(tmp_path / "m.gguf", tmp_path / "x.gguf", "--type", wanted, "--pure")
    assert not GGUFFile.open(tmp_path / "x.gguf").tensor("token_embd.weight")[3].any()


@pytest.mark.parametrize("target", ["x.gguf", "x"])
@pytest.mark.parametrize("moment", ["write", "rename"])
def test_a_disk_that_refuses_leaves_nothing_half_done(tmp_path, monkeypatch, target, moment):
    source = write_model(tmp_path / "m.gguf", LLAMA)
    (tmp_path / "there").mkdir()
    export(source, tmp_path / "there" / target)
    before = sorted((path, digest(path)) for path in (tmp_path / "there").rglob("*") if path.is_file())

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync" if moment == "write" else "replace", refuse)
    if moment == "rename":
        monkeypatch.setattr(Path, "replace", refuse)
        monkeypatch.setattr("zero_mpi.checkpoint.folders.replace_folder", refuse)
    with pytest.raises(JobError, match=r"cannot write .*x.*: No space left on device"):
        export(source, tmp_path / "there" / target, "--force")
    monkeypatch.undo()
    after = sorted((path, digest(path)) for path in (tmp_path / "there").rglob("*") if path.is_file())
    assert after == before
    assert os.listdir(tmp_path / "there") == [target]


def run(*arguments: Any, cwd: Path) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "zero_mpi", "export", *map(str, arguments)]
    return run_command(command, timeout=50, cwd=cwd)


def test_exit_statuses(tmp_path):
    write_model(tmp_path / "m.gguf", LLAMA)
    status, out, err = run("m.gguf", "x.gguf", "--type", "f16", cwd=tmp_path)
    assert (status, out[:13], err) == (0, "x.gguf: f16, ", "")
    for target, expected in (("x.gguf", 2), ("/proc/x.gguf", 1)):
        status, out, err = run("m.gguf", target, cwd=tmp_path)
        assert (status, out, err.count("\n"), "x.gguf" in err) == (expected, "", 1, True)
