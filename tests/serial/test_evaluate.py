"""Tests of `zero-mpi evaluate`: formulas, counted tokens, equal output at any number of ranks."""

import json
import math
import re
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import run_job
from test_command_bits import SIZES, needs_mpiexec, train
from test_generate import LLAMA, write_model

from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.commands.evaluate import scores
from zero_mpi.commands.evaluate.choices import EncodedChoices, read_choices
from zero_mpi.commands.evaluate.command import command
from zero_mpi.data import ByteTokenizer
from zero_mpi.errors import FileError, UsageError
from zero_mpi.launch.world import World
from zero_mpi.nn.linear import observing
from zero_mpi.train.text_model import TextModel

CONTEXT = 32
MODEL = replace(LLAMA, context_length=CONTEXT, value_length=4)
TEXT = "The quick brown fox, a naïve one, jumps over the lazy dog.\n" * 6
QUESTIONS = [
    {"question": "Two and two are", "answers": [" four", " five", " naïve"], "right": 0},
    {"context": "The fox jumps over", "answers": [" it", " the lazy dog"], "right": 1},
    {"question": "", "answers": ["a", "bcd"], "right": 0},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    write_model(folder / "new.gguf", MODEL)
    write_model(folder / "old.gguf", replace(MODEL, feed_forward_length=11))
    write_model(folder / "ids.gguf", replace(MODEL, vocab_size=61), {"tokenizer.ggml.model": "none"})
    keys = ByteTokenizer().metadata()
    tokens = keys["tokenizer.ggml.tokens"]
    tokens[65], tokens[66] = tokens[66], tokens[65]
    write_model(folder / "swapped.gguf", MODEL, keys)
    (folder / "text").write_text(TEXT)
    (folder / "short").write_text("Too short.")
    (folder / "tokenized").mkdir()
    np.save(folder / "tokenized" / "ids.npy", np.arange(100, dtype=np.uint16))
    shutil.copy(folder / "new.gguf", folder / "tokenized" / "tokenizer.gguf")
    np.save(folder / "ids.npy", np.arange(100, dtype=np.uint16) % 61)
    np.save(folder / "far.npy", np.array([1, 2, 300] * 30, np.uint16))
    (folder / "questions.jsonl").write_text("\n\n".join(map(json.dumps, QUESTIONS)) + "\n")
    return folder


def evaluate(folder: Path, *flags: str, ranks: int = 1) -> tuple[str, dict[str, Any]]:
    status, printed, errors = run_job(
        ranks, ["-m", "zero_mpi", "evaluate", *flags, "--json", "figures.json"], cwd=folder
    )
    assert (status, errors) == (0, ""), errors
    return printed, json.loads((folder / "figures.json").read_text())


def surprises(model: TextModel, ids: list[int]) -> np.ndarray:
    """Return -log(probability) in nats of each id but the first, as (n - 1,)."""
    return -log_probabilities(model, ids[:-1])[np.arange(len(ids) - 1), ids[1:]]


def log_probabilities(model: TextModel, ids: list[int]) -> np.ndarray:
    model.reset()
    logits = model.logits(ids).astype(np.float64)
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def text_ids() -> list[int]:
    return [*TEXT.encode(), ByteTokenizer.eos]


# ----------------------------------------------------------------------------------------- texts


@needs_mpiexec
@pytest.mark.parametrize(("context", "stride"), [(32, 32), (24, 7)])
def test_losses_of_windows_are_those_of_the_logits(folder, context, stride):
    flags = ["--context", str(context), *(["--stride", str(stride)] if stride != context else [])]
    _, figures = evaluate(folder, "new.gguf", "--data", "text", *flags)
    model, ids = TextModel(folder / "new.gguf"), text_ids()
    starts = range(0, len(ids) - context, stride)
    windows = [surprises(model, ids[start : start + context + 1]) for start in starts]
    tails = [found[context - stride if place else 0 :] for place, found in enumerate(windows)]
    text, found = figures["text"], figures["models"][0]["text"]
    np.testing.assert_allclose(found["window_losses"], [tail.mean() for tail in tails], rtol=1e-5)
    total, tokens = sum(tail.sum() for tail in tails), sum(map(len, tails))
    assert (text["windows"], text["tokens"]) == (len(windows), tokens)
    assert text["tokens_after_the_last_window"] == len(ids) - 1 - tokens
    nbytes = tokens - (text["tokens_after_the_last_window"] == 0)  # EOS has no bytes
    assert text["bytes"] == nbytes
    assert found["loss"] == pytest.approx(total / tokens, rel=1e-6)
    assert found["perplexity"] == math.exp(found["loss"])
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / nbytes, rel=1e-6)


@needs_mpiexec
def test_the_loss_is_the_validation_loss_of_training(tmp_path):
    """`evaluate` and a run have the same windows at the end of the token file, and equal losses."""
    ids = np.random.default_rng(0).integers(61, size=900).astype(np.uint16)
    np.save(tmp_path / "all.npy", ids)
    np.save(tmp_path / "held-out.npy", ids[len(ids) - 300 :])
    flags = ["--data", str(tmp_path / "all.npy"), "--vocab-size", "61", "--val-fraction", str(300 / 900)]
    flags += ["--steps", "2", "--warmup", "1", "--sample", "0", "--batch-size", "4", "--micro-batch", "1"]
    train(2, tmp_path / "run", *SIZES, *flags)
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    flags = ["--data", "held-out.npy", "--context", "16", "--micro-batch", "1"]
    printed, figures = evaluate(tmp_path, "run/latest", *flags, ranks=2)
    assert figures["models"][0]["text"]["loss"] == pytest.approx(last["val_loss"], rel=1e-12)
    assert f" {last['val_loss']:.6f} " in printed
    assert figures["text"]["bytes"] is None, "ids have no known bytes"
    assert figures["models"][0]["text"]["bits_per_byte"] is None


@needs_mpiexec
def test_the_same_text_on_any_ranks_and_over_any_transport(folder):
    flags = ["new.gguf", "--data", "text", "--choices", "questions.jsonl", "--against", "old.gguf"]
    printed, figures = evaluate(folder, *flags)
    for ranks, transport in [(3, "auto"), (2, "mpi"), (3, "shared")]:
        result = evaluate(folder, *flags, "--transport", transport, ranks=ranks)
        assert result == (printed, figures), f"{ranks} ranks, {transport}"


@needs_mpiexec
def test_windows_are_spread_and_precision_is_a_choice(folder):
    _, exact = evaluate(folder, "new.gguf", "--data", "text", "--micro-batch", "1")
    _, subset = evaluate(folder, "new.gguf", "--data", "text", "--windows", "3", "--micro-batch", "1")
    losses = exact["models"][0]["text"]["window_losses"]
    count = len(losses)
    assert count > 3
    expected = [losses[place * count // 3] for place in range(3)]
    assert subset["models"][0]["text"]["window_losses"] == expected
    assert (subset["text"]["windows"], subset["text"]["windows_of_the_text"]) == (3, count)
    flags = ["new.gguf", "--data", "text", "--precision", "bf16", "--json", "low.json"]
    assert run_job(2, ["-m", "zero_mpi", "evaluate", *flags], cwd=folder)[0] == 0  # prints a caution on speed
    low = json.loads((folder / "low.json").read_text())
    coarse, fine = (figures["models"][0]["text"]["loss"] for figures in (low, exact))
    assert coarse != fine
    assert coarse == pytest.approx(fine, rel=0.05)


# ------------------------------------------------------------------------------------- two models


@needs_mpiexec
def test_a_second_model_reads_the_same_windows(folder):
    flags = ["--data", "text", "--choices", "questions.jsonl"]
    single = [evaluate(folder, path, *flags)[1] for path in ("new.gguf", "old.gguf")]
    printed, report = evaluate(folder, "new.gguf", *flags, "--against", "old.gguf", ranks=2)
    assert report["models"] == [figures["models"][0] for figures in single]
    ours, theirs = report["models"]
    for name in ("loss", "perplexity", "bits_per_byte"):
        assert report["difference"]["text"][name] == ours["text"][name] - theirs["text"][name]
    for kind in scores.BY:
        assert report["difference"]["choices"]["right"][kind] == (
            ours["choices"]["right"][kind] - theirs["choices"]["right"][kind]
        )
    change = np.array(ours["text"]["window_losses"]) - np.array(theirs["text"]["window_losses"])
    error = change.std(ddof=1) / math.sqrt(len(change))  # windows of equal length
    assert report["difference"]["text"]["standard_error"] == pytest.approx(error)
    assert f"{report['difference']['text']['loss']:.6f}" in printed


# ---------------------------------------------------------------------------------------- choices


@needs_mpiexec
def test_answers_have_the_likelihood_of_their_tokens(folder):
    """Log-likelihoods do not depend on other rows of a micro-batch, which may have other lengths."""
    printed, figures = evaluate(
        folder, "new.gguf", "--choices", "questions.jsonl", "--micro-batch", "3", ranks=2
    )
    model, tokenizer, score = TextModel(folder / "new.gguf"), ByteTokenizer(), figures["models"][0]["choices"]
    right = dict.fromkeys(scores.BY, 0)
    for number, line in enumerate(QUESTIONS):
        question = [*line.get("question", line.get("context")).encode()] or [tokenizer.bos]
        nats = []
        for answer in line["answers"]:
            ids = [*question, *answer.encode()]
            nats.append(-surprises(model, ids)[len(question) - 1 :].sum())
        np.testing.assert_allclose(score["log_likelihoods"][number], nats, rtol=1e-5)
        sizes = np.array([len(answer.encode()) for answer in line["answers"]])
        assert figures["choices"]["answer_bytes"][number] == sizes.tolist()
        right["log_likelihood"] += int(np.argmax(nats)) == line["right"]
        right["per_byte"] += int(np.argmax(nats / sizes)) == line["right"]
        right["per_token"] = right["per_byte"]  # each token is one byte
    assert score["right"] == right
    assert 0 < right["log_likelihood"] < right["per_byte"] < len(QUESTIONS), "the three counts must differ"
    assert f"{right['per_byte']} ({100 * right['per_byte'] / 3:.2f} %)" in printed
    assert "text" not in figures


def test_letters_and_bytes_are_those_without_the_space_in_front():
    """The length of an answer excludes the leading space, which matters in some of these cases."""
    for answers, nats, expected in (
        ([" four", " twenty-four"], [0.9163, 1.2040], (1, 0, 0)),
        ([" ice", " été"], [0.9, 1.0], (1, 1, 0)),
        ([" да", " yes ok"], [3.0, 6.2], (1, 0, 1)),
    ):
        choices = EncodedChoices([np.arange(3)] * 2, [1, 1], [2], [0], answers)
        figures = scores.choice_figures(np.array(nats), choices)
        assert tuple(figures[name] for name in scores.ACC) == expected
    assert figures["right"]["per_byte"] == 1, "this count includes the space"


BAD_LINES = {
    "{": "Expecting property name",
    '{"answers": ["a", "b"], "right": 0}': "with one of question and context, found 'answers', 'right'",
    '{"question": "q", "answers": ["a"], "right": 0}': "answers: expected a list of 2 to 1000 texts",
    '{"question": "q", "answers": ["a", ""], "right": 0}': "expected texts that are not empty, found ''",
    '{"question": "q", "answers": ["a", "b"], "right": 2}': "right: expected the number of an answer, 0 to 1",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=str)
def test_a_bad_line_is_named_with_what_was_expected(tmp_path, line):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(QUESTIONS[0]) + "\n\n" + line)
    with pytest.raises(FileError, match=f"--choices .*bad.jsonl, line 3: .*{BAD_LINES[line]}"):
        read_choices(path)


# ----------------------------------------------------------------------------------------- errors

TEXT_OF = ("new.gguf", "--data", "text")
BAD = {
    "nothing": (["new.gguf"], "nothing to evaluate on: give --data PATH, --choices FILE or both"),
    "short": (["new.gguf", "--data", "short"], "context 32 needs at least 33 tokens, .* 11"),
    "context": ([*TEXT_OF, "--context", "33"], "--context 33: the model new.gguf .* 32"),
    "stride": ([*TEXT_OF, "--stride", "33"], "--stride 33: expected at most the context, 32"),
    "windows": (["new.gguf", "--choices", "questions.jsonl", "--windows", "2"], "--windows 2.*--data"),
    "a part for a teacher": ([*TEXT_OF, "--windows", "2", "--top-k-out", "t"], "--windows 2"),
    "no text to score": (["new.gguf", "--choices", "empty.jsonl"], "--choices empty.jsonl"),
    "other vocabulary": ([*TEXT_OF, "--against", "ids.gguf"], "--against ids.gguf: 61 tokens, expected 260"),
    "other tokens": ([*TEXT_OF, "--against", "swapped.gguf"], "--against swapped.gguf: token 65 is 'B'"),
    "tokens of another model": (["swapped.gguf", "--data", "tokenized"], "its token 65 is 'B', but"),
    "another tokenizer": (["ids.gguf", "--data", "text", "--tokenizer", "byte"], "--tokenizer byte has 260"),
    "long answer": (["new.gguf", "--choices", "long.jsonl"], r"long\.jsonl, line 1: .* 40 of 41 tokens"),
    "damaged": (["damaged.gguf", "--data", "text"], "blk.0.ffn_up.weight holds values that are not finite"),
    "KL without a reference": ([*TEXT_OF, "--kl"], "--against"),
    "KL without a text": (["new.gguf", "--choices", "t", "--against", "n", "--kl"], "--data"),
    "inputs without a text": (["new.gguf", "--choices", "t", "--imatrix", "i"], "--imatrix i: "),
    "large": (["large.gguf", "--data", "text"], "large.gguf: the loss of sequence 0 is nan, expected a num"),
    "top-k": (["damaged.gguf", *TEXT_OF[1:], "--top-k-out", "t", "--top-k", "261"], "260"),
}


@pytest.fixture(scope="module")
def faulty(folder: Path) -> Path:
    question = {"question": "q", "answers": ["a", "b"], "right": 0}
    (folder / "empty.jsonl").write_text('{"text": ""}\n' * 2)
    (folder / "long.jsonl").write_text(json.dumps(question | {"answers": ["a" * 40, "b"]}))
    for name, tensor, value in [("damaged", "ffn_up", np.nan), ("large", "attn_v", 3e38)]:
        file, raw = GGUFFile.open(folder / "new.gguf"), (folder / "new.gguf").read_bytes()
        values = file.tensor(f"blk.0.{tensor}.weight")
        raw = raw.replace(values.tobytes(), np.full_like(values, value).tobytes())
        (folder / f"{name}.gguf").write_bytes(raw)
    return folder


@pytest.mark.parametrize("case", BAD)
def test_a_fault_is_named(faulty, case, monkeypatch):
    flags, expected = BAD[case]
    monkeypatch.chdir(faulty)
    with pytest.raises(UsageError, match=expected):
        command(World(0, 1), flags)


@needs_mpiexec
def test_a_fault_is_one_line_of_two_ranks_and_status_2(faulty):
    flags, expected = BAD["large"]
    status, printed, errors = run_job(2, ["-m", "zero_mpi", "evaluate", *flags], cwd=faulty)
    assert (status, printed, errors.count("\n")) == (2, "", 1), errors
    assert re.search(expected, errors)


def test_divergence_is_that_of_the_logits_on_any_ranks(folder):
    """The figures are those of llama.cpp's perplexity --kl-divergence; --against is the reference."""
    flags = ("new.gguf", "--against", "old.gguf", "--data", "text", "--kl", "--windows", "3")
    printed, figures = evaluate(folder, *flags)
    assert evaluate(folder, *flags, ranks=2) == (printed, figures)
    models = [TextModel(folder / name) for name in ("new.gguf", "old.gguf")]
    ids, kl, squares, same = text_ids(), [], [], []
    starts = [i * CONTEXT for i in range(figures["text"]["windows_of_the_text"])]
    sample = [starts[i * len(starts) // 3] for i in range(3)]
    for start in sample:
        window = ids[start : start + CONTEXT]
        ours, base = (log_probabilities(model, window) for model in models)
        targets = ids[start + 1 : start + CONTEXT + 1]
        kl += (np.exp(base) * (base - ours)).sum(1).tolist()
        change = np.exp(ours) - np.exp(base)
        squares += [float(change[place, token] ** 2) for place, token in enumerate(targets)]
        same += (ours.argmax(1) == base.argmax(1)).tolist()
    divergence = figures["divergence"]
    assert np.allclose(
        [divergence["kl"], divergence["rms_change"], divergence["same_top"]],
        [np.mean(kl), np.sqrt(np.mean(squares)), np.mean(same)],
        rtol=1e-4,
    )
    assert "KL divergence" in printed


class Sums:
    """Sums of squares and counts of each matrix's inputs, computed by NumPy.

    The inputs of an expert's down matrix are computed here, without the router's weights.
    """

    def __init__(self, model: TextModel) -> None:
        self.model, self.squares, self.counts = model, dict[str, np.ndarray](), dict[str, np.ndarray]()

    def add(self, name: str, x: np.ndarray, bounds: list[int]) -> None:
        squares = [np.square(x[start:stop].astype(np.float64)).sum(0) for start, stop in pairwise(bounds)]
        self.squares[name] = self.squares.get(name, 0) + np.array(squares)
        self.counts[name] = self.counts.get(name, 0) + np.diff(bounds)[:, None]

    def observe(self, name: str, x: np.ndarray, starts: np.ndarray | None) -> None:
        flat, bounds = x.reshape(-1, x.shape[-1]), [0, x.size // x.shape[-1]]
        if starts is not None:
            bounds = starts.tolist()
        if "_down_exps" not in name:
            self.add(name, flat, bounds)
        if "_gate_exps" in name:
            gate, up = (
                np.concatenate([flat[a:b] @ w.T for w, (a, b) in zip(stack, pairwise(bounds), strict=True)])
                for stack in map(self.model.weights.get, (name, name.replace("gate", "up")))
            )
            self.add(name.replace("gate", "down"), gate / (1 + np.exp(-gate)) * up, bounds)


@pytest.mark.parametrize("experts", [0, 4])
def test_an_importance_matrix_has_the_squares_of_all_inputs(folder, experts):
    """The importance matrix equals NumPy's sums at any number of ranks; the head has no entry."""
    mixture = {"expert_count": experts, "expert_used_count": 2} if experts else {}
    write_model(folder / "mix.gguf", replace(MODEL, **mixture))
    flags = ("mix.gguf", "--data", "text", "--micro-batch", "2", "--imatrix")
    for ranks in (1, 3):
        evaluate(folder, *flags, f"im{ranks}.gguf", ranks=ranks)
    assert (folder / "im1.gguf").read_bytes() == (folder / "im3.gguf").read_bytes()
    file, ids = GGUFFile.open(folder / "im1.gguf"), text_ids()
    sums, windows = Sums(TextModel(folder / "mix.gguf")), int(file.metadata["imatrix.chunk_count"])
    for start in range(0, windows * CONTEXT, CONTEXT):
        x: object = np.array([ids[start : start + CONTEXT]])
        with observing(sums.observe):
            for stage in sums.model.stages:
                x, _ = stage.layer.forward(sums.model.weights, x)
    names = {name for name in sums.squares if name.startswith("blk.")}
    assert set(file.tensors) == {name + end for name in names for end in (".in_sum2", ".counts")}
    assert len(names) == (8 if experts else 7) * MODEL.block_count
    for name in names:
        assert len(sums.counts[name]) == (experts if "_exps" in name else 1)
        assert file.tensor(name + ".counts").tolist() == sums.counts[name].tolist()
        np.testing.assert_allclose(file.tensor(name + ".in_sum2"), sums.squares[name], rtol=2e-6, atol=1e-12)
    keys = {key: file.metadata[key] for key in ("general.type", "imatrix.chunk_size", "imatrix.datasets")}
    assert keys == {"general.type": "imatrix", "imatrix.chunk_size": CONTEXT, "imatrix.datasets": ["text"]}
