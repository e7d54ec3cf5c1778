"""Tests of --bos, the BOS token at the beginning of each window, in training and evaluation."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import bpe_files
import numpy as np
import pytest
import sentencepiece_files
from corpora import load_corpus
from jobs import run_job
from test_command_bits import needs_mpiexec, train
from test_evaluate import surprises

from zero_mpi.commands.evaluate.measure import WindowSet
from zero_mpi.config.settings import Config
from zero_mpi.data import Windows, tokenizer_from_metadata
from zero_mpi.data.tokenizers.byte import ALWAYS, AUTO, NEVER, bos_of
from zero_mpi.errors import UsageError
from zero_mpi.train import resume
from zero_mpi.train.text_model import TextModel

CONTEXT, BOS = 16, 1
TEXT = "The quick brown fox, a naïve one, jumps over the lazy dog.\n" * 5
ASKS = tokenizer_from_metadata(sentencepiece_files.merged(400, add_bos_token=True))


def test_no_bos_to_begin_with_is_refused():
    with pytest.raises(UsageError, match="--bos always"):
        bos_of(SimpleNamespace(add_bos=False, bos=None), ALWAYS)


@pytest.mark.parametrize(("context", "stride"), [(4, None), (4, 3), (1, None), (9, 2)])
def test_each_window_begins_with_it_and_every_token_is_predicted_once(context, stride):
    ids = np.arange(100, 140, dtype=np.uint16)
    windows = Windows(ids, context, stride, BOS)
    batch = windows.batch(range(len(windows)))
    assert batch.inputs.shape == (len(windows), context)
    assert set(batch.inputs[:, 0]) == {BOS}
    np.testing.assert_array_equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    spans = WindowSet(windows, 3)
    micro = map(spans.micro, range(spans.micro_batches))
    seen = np.concatenate([loss.targets[part] for _, loss, _ in micro for part in loss.parts])
    np.testing.assert_array_equal(seen, ids[: len(seen)])
    assert len(ids) - len(seen) < (stride or context)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bos")
    for name, add_bos in (("asks", True), ("not", False)):
        bpe_files.write_model(root / f"{name}.gguf", sentencepiece_files.merged(400, add_bos_token=add_bos))
    (root / "text").write_text(TEXT)
    np.save(root / "ids.npy", np.arange(100, dtype=np.uint16))
    return root


def losses(folder: Path, bos: int | None) -> np.ndarray:
    model, ids = TextModel(folder / "asks.gguf"), [*ASKS.encode(TEXT).tolist(), ASKS.eos]
    first, width = ([], CONTEXT + 1) if bos is None else ([bos], CONTEXT)
    starts = range(0, len(ids) - width + 1, CONTEXT)
    return np.array([surprises(model, [*first, *ids[start : start + width]]).mean() for start in starts])


@needs_mpiexec
@pytest.mark.parametrize(
    ("model", "asked", "bos"),
    [("asks", AUTO, 1), ("asks", NEVER, None), ("not", AUTO, None), ("not", ALWAYS, 1)],
)
def test_an_evaluation_reads_each_window_behind_it(folder, model, asked, bos):
    flags = [f"{model}.gguf", "--data", "text", "--context", str(CONTEXT), "--bos", asked, "--json", "x.json"]
    status, _, errors = run_job(2, ["-m", "zero_mpi", "evaluate", *flags], cwd=folder)
    assert (status, errors) == (0, "")
    figures = json.loads((folder / "x.json").read_text())
    assert figures["text"]["bos"] == bos
    expected = losses(folder, bos)
    np.testing.assert_allclose(figures["models"][0]["text"]["window_losses"], expected, rtol=1e-5)
    of_all = len(ASKS.encode(TEXT)) + 1
    assert figures["text"]["tokens"] + figures["text"]["tokens_after_the_last_window"] == of_all - (
        bos is None
    )


@needs_mpiexec
def test_token_files_are_read_as_they_are_and_models_that_differ_are_told(folder):
    figures = []
    for bos in (ALWAYS, NEVER):
        flags = ["asks.gguf", "--data", "ids.npy", "--context", "16", "--bos", bos, "--json", "x.json"]
        status, _, errors = run_job(1, ["-m", "zero_mpi", "evaluate", *flags], cwd=folder)
        assert (status, len(errors.splitlines()), "--bos always" in errors) == (0, *[bos == ALWAYS] * 2)
        figures.append(json.loads((folder / "x.json").read_text()))
    assert figures[0] == figures[1]
    keys = sentencepiece_files.merged(400, add_bos_token=True)
    keys["tokenizer.ggml.scores"] = np.negative(keys["tokenizer.ggml.scores"])
    bpe_files.write_model(folder / "other.gguf", keys | {"tokenizer.ggml.bos_token_id": np.uint32(2)})
    for bos, other, names in (
        (AUTO, "not", ["--bos always"]),
        (NEVER, "not", []),
        (AUTO, "other", ["tokenizer.ggml.scores", "tokenizer.ggml.bos_token_id"]),
    ):
        flags = ["asks.gguf", "--data", "text", "--against", f"{other}.gguf", "--bos", bos]
        status, _, errors = run_job(1, ["-m", "zero_mpi", "evaluate", *flags], cwd=folder)
        assert (status, len(errors.splitlines())) == (0, bool(names)), errors
        assert all(name in errors for name in (*names, f"{other}.gguf" if names else ""))


def test_of_a_mixture_only_text_has_it(folder):
    paths = [f"{folder}/text=0.5", f"{folder}/ids.npy=0.5"]
    flags = {"val_fraction": 0.0, "context": 8, "seed": 0, "tokenizer": ASKS, "vocab_size": ASKS.vocab_size}
    assert [part.bos for part in load_corpus(paths, bos=BOS, **flags).parts] == [BOS, None]


@needs_mpiexec
@pytest.mark.parametrize("packing", ["none", "documents"])
def test_training_begins_at_the_loss_of_an_evaluation(folder, tmp_path, packing):
    flags = ["--init", str(folder / "asks.gguf"), "--data", str(folder / "text"), "--val-fraction", "0"]
    flags += ["--context", str(CONTEXT), "--steps", "1", "--sample", "0", "--packing", packing]
    flags += ["--micro-batch", "1"]
    expected, ids = losses(folder, BOS), len(ASKS.encode(TEXT)) + 1
    if packing == "documents":
        model, tokens = TextModel(folder / "asks.gguf"), [*ASKS.encode(TEXT).tolist(), ASKS.eos]
        parts = [tokens[start : start + CONTEXT] for start in range(0, ids, CONTEXT)]
        expected = np.concatenate([surprises(model, [BOS, *part]) for part in parts])
    windows = -(-ids // CONTEXT) if packing == "documents" else ids // CONTEXT
    train(2, tmp_path / "run", *flags, "--batch-size", str(windows))
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(expected.mean(), rel=2e-6)


@pytest.mark.parametrize(
    ("settings", "asked", "expected"),
    [({}, AUTO, NEVER), ({}, ALWAYS, ALWAYS), ({"bos": ALWAYS}, AUTO, ALWAYS), ({"bos": NEVER}, AUTO, NEVER)],
)
def test_a_run_that_began_without_goes_on_without(folder, monkeypatch, tmp_path, settings, asked, expected):
    monkeypatch.setattr(resume, "read_json", lambda state, key: settings)
    point = resume.ResumePoint(tmp_path, SimpleNamespace(state=None))
    config = Config(data=[str(folder / "text")], bos=asked)
    assert resume.settled_bos(config, ASKS, point) == expected
    assert resume.settled_bos(config, ASKS, None) == ALWAYS, "a new run uses the token"
    assert resume.settled_bos(replace(config, data=[str(folder / "ids.npy")]), ASKS, None) == NEVER
    assert replace(config, bos=expected).fixed()["bos"] == expected
