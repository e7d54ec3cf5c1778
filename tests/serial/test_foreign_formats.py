"""Configurations, tokenizers, token files that lie: refused before anything of their size is made."""

import json
import os
import tracemalloc

import fuzz_safetensors
import fuzz_tokens
import hf_models
import numpy as np
import pytest
import wild
from corpora import load_corpus

from zero_mpi.checkpoint.weights import open_weights
from zero_mpi.data import tokenizer_from_json
from zero_mpi.errors import UsageError

LITTLE = 8 << 20  # bytes of Python's memory: a configuration, headers, JSON's own
ROPE = hf_models.LLAMA3


def refusal(action):
    tracemalloc.start()
    try:
        with pytest.raises(UsageError) as caught:
            action()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    line = str(caught.value)
    assert peak < LITTLE
    assert line.isprintable()
    assert len(line) < 700
    return line


@pytest.fixture
def folder(tmp_path):
    config = hf_models.CONFIGS["llama"] | {"vocab_size": 260}
    made = hf_models.write_folder(tmp_path / "model", config, hf_models.random_tensors(config))
    (made / "tokenizer.json").write_text(fuzz_safetensors.tokenizer_text())
    return made


def change(path, edits):
    path.write_text(json.dumps(json.loads(path.read_text()) | edits))


MANY = 200_000_000
SIZES = {
    "layers": ({"num_hidden_layers": MANY, "layer_types": ["full_attention"] * 2}, "layer_types"),
    "head": ({"head_dim": 2**31 - 2, "rope_scaling": ROPE}, "head_dim: expected at most 16384"),
    "wide heads": ({"head_dim": 16384, "rope_scaling": ROPE}, "rows"),
    "infinite": ({"rope_theta": float("inf")}, "Infinity"),
    "nested": ({"rope_scaling": json.loads("[" * 200 + "]" * 200)}, "nested"),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_a_configuration_that_lie_cost_nothing(folder, name):
    edits, message = SIZES[name]
    change(folder / "config.json", edits)
    line = refusal(lambda: open_weights(folder))
    assert str(folder) in line
    assert message in line


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
@pytest.mark.parametrize("kind", ["zero", "pipe", "folder", "sparse", "loop"])
def test_what_is_no_file_is_refused_in_any_place(folder, name, kind):
    (folder / name).unlink(missing_ok=True)
    wild.special(None, folder / name, kind)
    read = lambda: tokenizer_from_json(folder / "tokenizer.json")  # noqa: E731
    if name == "config.json":
        read = lambda: open_weights(folder)  # noqa: E731
    assert name in refusal(read) or (kind, name) == ("loop", "config.json")


OF_ANOTHER_TYPE = {
    "tokenizer": {"added_tokens": {"a": 1}, "normalizer": 5},
    "tokenizer_config": {"bos_token": 5, "eos_token": [1], "add_bos_token": "yes", "chat_template": 3},
    "generation_config": {"eos_token_id": "1", "bos_token_id": {}, "pad_token_id": 1.5},
}


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name, values in OF_ANOTHER_TYPE.items() for key in values]
)
def test_a_value_of_another_type_is_named_with_its_file(folder, name, key):
    path = folder / f"{name}.json"
    if not path.exists():
        path.write_text("{}")
    change(path, {key: OF_ANOTHER_TYPE[name][key]})
    line = refusal(lambda: tokenizer_from_json(folder / "tokenizer.json"))
    assert path.name in line
    assert key in line


def test_what_a_tokenizer_has_not_is_not_made(folder):
    for depth, message in ((300, "nested"), (40, "Nmt")):
        inner = {"type": "Nmt"}
        for _ in range(depth):
            inner = {"type": "Sequence", "normalizers": [inner]}
        change(folder / "tokenizer.json", {"normalizer": inner})
        assert message in refusal(lambda: tokenizer_from_json(folder / "tokenizer.json"))
    change(folder / "tokenizer.json", {"normalizer": None})
    line = refusal(lambda: tokenizer_from_json(folder / "tokenizer.json", 1 << 31))
    assert "2147483648, found 260 tokens" in line


def load(path):
    flags = {"val_fraction": 0.0, "context": 4, "seed": 0, "tokenizer": None, "vocab_size": 61}
    return load_corpus([str(path)], **flags)


@pytest.mark.parametrize("text", fuzz_tokens.ODD_HEADERS, ids=lambda text: repr(text[:20]))
def test_a_header_that_is_none_is_refused(tmp_path, text):
    r"""Of `\` and newlines, say, for which NumPy's reader raises an error that is no ValueError."""
    path = tmp_path / "ids.npy"
    path.write_bytes(fuzz_tokens.header(text) + fuzz_tokens.IDS)
    assert f"cannot read {path} as a token file: " in refusal(lambda: load(path))


LYING = {
    "too long": (fuzz_tokens.usual(shape=(501,)), "1130 bytes"),
    "too short": (fuzz_tokens.usual(shape=(10,)), "148 bytes"),
    "beyond all": (fuzz_tokens.usual(shape=(10**30,)), "found 1128"),
    "negative": (fuzz_tokens.usual(shape=(-1,)), "126 bytes"),
    "no length": (fuzz_tokens.usual(shape=500), "the header"),
}


@pytest.mark.parametrize("name", LYING)
def test_a_length_that_lies_is_refused(tmp_path, name):
    text, message = LYING[name]
    path = tmp_path / "ids.npy"
    path.write_bytes(fuzz_tokens.header(text) + fuzz_tokens.IDS)
    assert message in refusal(lambda: load(path))


def test_8_gib_of_nothing_behind_the_ids_are_not_read(tmp_path):
    path = tmp_path / "ids.npy"
    path.write_bytes(fuzz_tokens.header(fuzz_tokens.usual()) + fuzz_tokens.IDS)
    os.truncate(path, 8 << 30)
    assert "found 8589934592" in refusal(lambda: load(path))


L = b'{"shape": (500L,), "fortran_order": False, "descr": "<u2"}\n'
TIGHT = b"{'shape':(500,),'descr':'<u2','fortran_order':False}"
USUAL = fuzz_tokens.usual()
TURNED = fuzz_tokens.usual(order=True)  # of one dimension both orders are the same


@pytest.mark.parametrize(
    ("text", "version"), [(USUAL, (2, 0)), (USUAL, (3, 0)), (TURNED, (1, 0)), (L, (1, 0)), (TIGHT, (1, 0))]
)
def test_other_writers_spell_a_header_otherwise(tmp_path, text, version):
    path = tmp_path / "ids.npy"
    path.write_bytes(fuzz_tokens.header(text, version) + fuzz_tokens.IDS)
    assert load(path).train.ids.held().tolist() == np.frombuffer(fuzz_tokens.IDS, "<u2").tolist()
