"""Foreign files are read within limits, and files with wrong sizes are refused cheaply."""

import json
import os
import tracemalloc

import fuzz_safetensors
import fuzz_tokens
import hf_models
import numpy as np
import pytest
from corpora import load_corpus

from zero_mpi.checkpoint.weights import open_weights
from zero_mpi.data import tokenizer_from_json
from zero_mpi.files.open import MOST_LINE, read_file, read_lines
from zero_mpi.files.parse import parse_json, parse_toml

LITTLE = 8 << 20  # maximum bytes of memory to read a configuration, headers and JSON
ROPE = hf_models.LLAMA3


def refusal(action):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r".+") as caught:
            action()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    line = str(caught.value)
    assert peak < LITTLE
    assert line.isprintable()
    assert len(line) < 700
    return line


def test_a_long_file_is_not_read_at_all(tmp_path):
    (tmp_path / "it").touch()
    os.truncate(tmp_path / "it", 1 << 40)
    assert "at most 33554432 bytes" in refusal(lambda: read_file(tmp_path / "it", 32 << 20))
    assert read_file("/proc/self/status", 32 << 20), "the system reports no length for this file"


@pytest.mark.parametrize("raw", [b"[" + b"[]," * 3_000_000 + b"0]", b'{"a":' * 150 + b"1" + b"}" * 150])
def test_very_many_values_or_levels_are_refused_before_they_are_parsed(raw):
    message = refusal(lambda: parse_json(raw))
    assert "more than 2097152 values" in message or "nested too deeply" in message
    refusal(lambda: parse_toml(b".".join([b"a"] * 150) + b" = 1"))


def test_lines_are_read_within_bounds_and_chosen_by_what_they_hold(tmp_path):
    path, long = tmp_path / "it", b"x" * (MOST_LINE - 1)
    path.write_bytes(b"one\n" + b"\0" * (3 * MOST_LINE) + b"\ntwo\n" + long + b"\nend\n")
    assert [line[:4] for line in read_lines(path, b"")] == [b"one", b"two", b"xxxx", b"end"]
    os.truncate(path, 8 << 30)
    assert "found longer" in refusal(lambda: list(read_lines(path, b"")))
    path.write_bytes(b"\n".join([b"", b"a step", b"", long + b"xstep", b"step", b"st", b"ep"]) * 3)
    assert list(read_lines(path, b"step")) == [b"a step", b"step"] * 3


@pytest.fixture
def folder(tmp_path):
    config = hf_models.CONFIGS["llama"] | {"vocab_size": 260}
    model = hf_models.write_folder(tmp_path / "model", config, hf_models.random_tensors(config))
    (model / "tokenizer.json").write_text(fuzz_safetensors.tokenizer_text())
    return model


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


L = b'{"shape": (500L,), "fortran_order": False, "descr": "<u2"}\n'
TIGHT = b"{'shape':(500,),'descr':'<u2','fortran_order':False}"
USUAL = fuzz_tokens.usual()
TURNED = fuzz_tokens.usual(order=True)  # a 1-D array is equal in both orders


@pytest.mark.parametrize(
    ("text", "version"), [(USUAL, (2, 0)), (USUAL, (3, 0)), (TURNED, (1, 0)), (L, (1, 0)), (TIGHT, (1, 0))]
)
def test_other_writers_spell_a_header_otherwise(tmp_path, text, version):
    path = tmp_path / "ids.npy"
    path.write_bytes(fuzz_tokens.header(text, version) + fuzz_tokens.IDS)
    assert load(path).train.ids.read_all().tolist() == np.frombuffer(fuzz_tokens.IDS, "<u2").tolist()
