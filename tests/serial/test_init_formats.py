"""`--init` with any model format gives the same run as the float32 file, at any number of ranks."""

import shutil
import tomllib
from pathlib import Path

import bpe_files
import hf_models
import numpy as np
import pytest
from jobs import run_job
from test_command_bits import fields, needs_mpiexec, tensors, train
from test_command_bits import text as text
from test_export import export
from test_resume import refused

from zero_mpi.checkpoint.gguf.reader import GGUFFile

pytestmark = needs_mpiexec
SIZES = ["--layers", "2", "--dim", "64", "--heads", "4", "--ffn", "96", "--context", "16"]
RUN = ["--batch-size", "5", "--micro-batch", "2", "--context", "16", "--sample", "0", "--warmup", "2"]
ARCHES = ["llama", "gpt2", "qwen2", "qwen3"]


@pytest.fixture(scope="module")
def models(text, tmp_path_factory) -> dict[str, Path]:
    place, paths = tmp_path_factory.mktemp("models"), {}
    for arch in ARCHES:
        flags = [*SIZES, "--arch", arch, "--batch-size", "1", "--steps", "0", "--sample", "0"]
        train(1, place / arch, *flags, "--data", *text)
        paths[arch] = place / arch / "latest" / "model.gguf"
    return paths


def start(ranks: int, out: Path, init: Path, text: list[str], *flags: str) -> Path:
    train(ranks, out, "--init", str(init), "--data", *text, *RUN, "--steps", "2", *flags)
    return out


def as_folder(model: Path, folder: Path) -> Path:
    export(model, folder)
    return folder


def as_parts(model: Path, folder: Path) -> Path:
    folder.mkdir()
    export(model, folder / "model.gguf", "--split-size", "100KB")
    assert len(list(folder.iterdir())) > 1
    return min(folder.iterdir())


@pytest.mark.parametrize(("arch", "form"), [*((arch, as_folder) for arch in ARCHES), ("qwen3", as_parts)])
def test_the_same_run_as_from_the_float32_file(arch, form, models, text, tmp_path):
    """No bit is lost in any format, and the checkpoint is a plain GGUF."""
    expected = start(1, tmp_path / "expected", models[arch], text)
    actual = start(3, tmp_path / "found", form(models[arch], tmp_path / "form"), text)
    assert fields(actual) == fields(expected)
    ours, theirs = (tensors(out / "latest" / "model.gguf") for out in (actual, expected))
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not np.array_equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_records_have_the_sizes_of_the_model_and_replay_it(arch, models, text, tmp_path):
    """config.toml has the sizes of the model; with it the run can be repeated and resumed."""
    out, replay = start(1, tmp_path / "out", models[arch], text), tmp_path / "again"
    settings = tomllib.loads((out / "config.toml").read_text())
    sizes = {"arch": arch, "layers": 2, "dim": 64, "heads": 4, "kv_heads": 4, "ffn": 96}
    assert {name: settings[name] for name in sizes} == sizes
    assert settings["tied"] == (arch == "gpt2")
    assert settings["lr"] == 5e-5
    train(2, replay, "--config", str(out / "config.toml"))
    assert fields(replay) == fields(out)
    train(1, out, "--config", str(out / "config.toml"), "--steps", "3")
    assert len(fields(out)) == 3


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q5_1"])
def test_stored_types_start_from_their_values(kind, models, text, tmp_path):
    export(models["llama"], tmp_path / "small.gguf", "--type", kind)
    out = start(3, tmp_path / "out", tmp_path / "small.gguf", text, "--lr", "0", "--min-lr", "0")
    read, saved = GGUFFile.open(tmp_path / "small.gguf"), GGUFFile.open(out / "latest" / "model.gguf")
    assert len(fields(out)) == 2
    assert all(np.array_equal(read.tensor(name), saved.tensor(name)) for name in read.tensors)


def test_a_model_that_is_not_finite_is_refused(models, text, tmp_path):
    path = Path(shutil.copy(models["llama"], tmp_path / "broken.gguf"))
    info = GGUFFile.open(path).tensors["blk.1.ffn_down.weight"]
    with path.open("r+b") as file:
        file.seek(info.offset + info.nbytes - 4)
        file.write(np.float32(np.inf).tobytes())
    line = refused(3, tmp_path / "out", "--init", str(path), "--data", *text, *RUN)
    assert "blk.1.ffn_down.weight holds values that are not finite" in line


AS_BEFORE = """
from zero_mpi.data.tokenizers import tokenizer_json

tokenizer_json.rules_json = lambda *given, **options: {}

from zero_mpi.train.command import main

main()
"""


def test_a_run_that_began_without_the_rules_of_a_folder_s_tokenizer_goes_on_without(text, tmp_path):
    pytest.importorskip("tokenizers", reason="no tokenizers")
    config = hf_models.CONFIGS["llama"] | {"vocab_size": 320}
    hf_models.write_folder(tmp_path / "hf", config, hf_models.random_tensors(config))
    content = bpe_files.trained_json("gpt-2", tokens=300) | {"normalizer": {"type": "NFC"}}
    bpe_files.write_json(tmp_path / "hf", content)
    (tmp_path / "before.py").write_text(AS_BEFORE)
    (tmp_path / "letters.txt").write_text("Cafe\u0301 u\u0308ber alles. " * 300)
    out = tmp_path / "run"
    flags = ["--init", str(tmp_path / "hf"), "--data", str(tmp_path / "letters.txt"), *RUN]
    before = [str(tmp_path / "before.py"), "--out", str(out), *flags, "--steps", "1"]
    assert run_job(1, before, timeout=60)[0] == 0
    train(2, out, *flags, "--steps", "2")
    assert run_job(2, ["-m", "zero_mpi", "verify", str(out)], timeout=60)[0] == 0
    assert len(fields(out)) == 2
    keys = GGUFFile.open(out / "latest" / "model.gguf").metadata
    assert "tokenizer.huggingface.rules" not in keys
    train(1, tmp_path / "new", *flags, "--steps", "1")
    assert "tokenizer.huggingface.rules" in GGUFFile.open(tmp_path / "new" / "latest" / "model.gguf").metadata
