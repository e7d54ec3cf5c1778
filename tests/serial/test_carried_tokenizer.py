"""A run on ids keeps the tokenizer of its --init folder, so that its checkpoints can generate text."""

import json
import sys

import bpe_files
import hf_models
import numpy as np
import pytest
import sentencepiece_files
from jobs import run_command
from test_command_bits import needs_mpiexec, train
from test_export import export

from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.data import ByteTokenizer, tokenizer_from_json, tokenizer_json

pytest.importorskip("tokenizers", reason="the package tokenizers is not installed", exc_type=ImportError)
pytestmark = needs_mpiexec
CONFIG = hf_models.CONFIGS["llama"] | {"vocab_size": 260}
RUN = ["--batch-size", "2", "--micro-batch", "1", "--context", "16", "--steps", "1", "--sample", "0"]


@pytest.fixture
def folder(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(500, dtype=np.uint16) % 256)
    return hf_models.write_folder(tmp_path / "model", CONFIG, hf_models.random_tensors(CONFIG))


def trained(folder, ranks=1):
    """Train one step on ids; return the keys of the checkpoint, the output and the path."""
    out, ids = folder.parent / "out", folder.parent / "ids.npy"
    output = train(ranks, out, "--init", str(folder), "--data", str(ids), *RUN)
    model = out / "latest" / "model.gguf"
    return GGUFFile.open(model).metadata, output, model


def test_the_folders_tokenizer_is_carried_over(folder, tmp_path):
    """The tokenizer is copied into the checkpoint and from there into an exported folder."""
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(ByteTokenizer().metadata())))
    keys, _, model = trained(folder, ranks=2)
    expected = tokenizer_from_json(folder / "tokenizer.json", 260).metadata()
    assert [key for key in expected if not np.array_equal(keys[key], expected[key])] == []
    export(model, tmp_path / "again")
    assert tokenizer_from_json(tmp_path / "again" / "tokenizer.json").tokens == keys["tokenizer.ggml.tokens"]


@pytest.mark.parametrize("content", [None, "{}"], ids=["none", "unknown kind"])
def test_a_folder_without_one_that_can_be_carried_says_so(folder, content):
    if content is not None:
        (folder / "tokenizer.json").write_text(content)
    keys, output, _ = trained(folder)
    assert keys["tokenizer.ggml.model"] == "none", (
        "llama.cpp requires this key to open a file without a tokenizer"
    )
    assert "checkpoints will have no tokenizer" in output


@pytest.mark.parametrize("make", [sentencepiece_files.merged, sentencepiece_files.likely])
def test_a_model_with_a_tokenizer_of_sentencepiece_learns_from_text(make, tmp_path):
    """The model's tokenizer encodes the text, its keys stay in the checkpoint, and `generate` uses it."""
    keys, text = make(), tmp_path / "text.txt"
    text.write_text("A model reads words, and 日本 too.\n" * 40)
    init = bpe_files.write_model(tmp_path / "model.gguf", keys)
    outs = [tmp_path / f"out{ranks}" for ranks in (1, 2)]
    for ranks, out in zip((1, 2), outs, strict=True):
        train(ranks, out, "--init", str(init), "--data", str(text), *RUN)
    models = [out / "latest" / "model.gguf" for out in outs]
    assert models[0].read_bytes() == models[1].read_bytes()
    metadata = GGUFFile.open(models[0]).metadata
    for name in ("model", "tokens", "scores", "token_type"):
        assert np.array_equal(metadata[f"tokenizer.ggml.{name}"], keys[f"tokenizer.ggml.{name}"])
    command = [sys.executable, "-m", "zero_mpi", "generate", str(models[0]), "--prompt", "words and"]
    status, printed, errors = run_command([*command, "--tokens", "3"], timeout=120)
    assert (status, printed.startswith("words and")) == (0, True), errors
