"""Tests of defaults that depend on the data, the model or an earlier job of the run."""

import json
import math
import re
import tomllib
from dataclasses import replace
from types import SimpleNamespace

import pytest
from chat_templates import CHATML
from jobs import run_job
from test_chat_data import SAME, TALK, write_lines
from test_command_bits import needs_mpiexec, train
from test_generate import LLAMA, write_model

from zero_mpi.config.command_line import parse
from zero_mpi.data import ByteTokenizer
from zero_mpi.train import resume

FLAGS = ["--init", "m.gguf", "--data", "chat.jsonl", "--lora", "2", "--sample", "0", "--val-fraction", "0"]
LONG = {"prompt": "Two and two?", "completion": "They are four, " * 4}
OF_0_1_0 = {"context": 128, "batch_size": 16, "steps": 2, "warmup": 40, "lr": 2e-4}


@pytest.fixture
def folder(tmp_path):
    write_lines(tmp_path / "chat.jsonl", *[{"messages": TALK}, SAME] * 34, {"messages": TALK}, LONG)
    return tmp_path


def settings(folder):
    return tomllib.loads((folder / "out" / "config.toml").read_text())


def model(folder, context):
    config = replace(LLAMA, context_length=context, value_length=4)
    write_model(folder / "m.gguf", config, ByteTokenizer(CHATML).metadata())


@needs_mpiexec
@pytest.mark.parametrize("room", [200, 150])
def test_conversations_beside_a_model_decide_what_no_flag_says(room, folder):
    model(folder, room)
    printed = train(2, folder / "out", *FLAGS)
    config, longest = settings(folder), 171
    assert config["context"] == min(room, longest)
    assert config["batch_size"] == 4
    windows = int(printed.partition(" cut) in ")[2].split()[0])
    assert config["steps"] == -(-3 * windows // 4)
    assert config["warmup"] == round(0.09 * config["steps"])
    assert f"70 conversations ({int(room < longest)} cut) in " in printed
    assert f"steps:     {config['steps']}, 3.0 epochs; rate " in printed
    command = ["-m", "zero_mpi.train", *FLAGS, "--out", "new", "--dry-run"]
    status, output, _ = run_job(1, command, cwd=folder, timeout=50)
    assert status == 0
    assert f"steps      {config['steps']}, 3.0 epochs; rate " in output
    assert f"step       {4 * config['context']} tokens: " in output
    assert f" after {config['warmup']} warmup steps" in output


@needs_mpiexec
def test_a_run_goes_on_with_the_defaults_that_it_began_with(folder):
    """A run that began with an earlier version keeps that version's defaults; flags override them."""
    model(folder, 200)
    flags = [part for name, value in OF_0_1_0.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    assert "warning: --warmup 40" in train(1, folder / "out", *FLAGS, *flags)
    assert "nothing to do" in train(2, folder / "out", *FLAGS)
    printed = train(2, folder / "out", *FLAGS, "--steps", "3")
    config = settings(folder)
    assert {name: config[name] for name in OF_0_1_0} == OF_0_1_0 | {"steps": 3}
    assert "changed since the checkpoint: --steps was 2, now 3\n" in printed
    train(1, folder / "out", *FLAGS, "--steps", "4", "--warmup", "1", "--lr", "1e-3")
    assert (settings(folder)["warmup"], settings(folder)["lr"]) == (1, 1e-3)


@needs_mpiexec
def test_a_jump_of_the_rate_is_a_caution(folder):
    """A caution names both rates; a resume without changes has no caution."""
    model(folder, 200)
    flags = [*FLAGS, "--batch-size", "4", "--warmup", "1", "--lr", "1e-3"]
    train(1, folder / "out", *flags, "--steps", "4")
    assert "rate jumps" not in train(1, folder / "out", *flags, "--steps", "4")
    printed = train(2, folder / "out", *flags, "--steps", "40", "--dry-run")
    last, new = (1e-4 + 9e-4 * (1 + math.cos(math.pi * part)) / 2 for part in (2 / 3, 3 / 39))
    (line,) = [line for line in printed.splitlines() if "rate jumps" in line]
    assert f" {last:.3g} at step 4 to {new:.3g} at step 5" in line
    assert f"--lr {last:.3g}" in line


@pytest.mark.parametrize(("begun", "warns"), [(2, False), (4, True)])
def test_a_short_run_that_ended_before_its_rate_fell_goes_on_without_a_jump(begun, warns, monkeypatch):
    config = replace(parse(["--steps", "40", "--lr", "1e-3"]), warmup=1)
    plan, point = (
        replace(config, steps=begun).plan(),
        SimpleNamespace(files=SimpleNamespace(state=None), folder=""),
    )
    monkeypatch.setattr(resume, "read_progress", lambda state: SimpleNamespace(step=begun))
    monkeypatch.setattr(resume, "read_json", lambda state, key: plan)
    assert bool([*resume.jumps_of_rate(point, config)]) == warns


@needs_mpiexec
def test_a_model_of_a_short_context_needs_no_flag(folder):
    """The default context is the model's if that is shorter; a longer --context is refused."""
    model(folder, 64)
    (folder / "text.txt").write_text("some text " * 1000)
    command = ["-m", "zero_mpi.train", "--init", "m.gguf", "--data", "text.txt", "--dry-run"]
    status, printed, errors = run_job(1, command, cwd=folder, timeout=50)
    assert status == 0, errors
    assert re.search(rf"(?m)^step +{16 * 64:,} tokens: ", printed)
    status, _, errors = run_job(1, [*command, "--context", "65"], cwd=folder, timeout=50)
    assert (status, errors.count("\n")) == (2, 1)
    assert "--context 65" in errors
    command = ["-m", "zero_mpi", "plan", "--init", "m.gguf", "--ranks", "2"]
    assert run_job(1, command, cwd=folder, timeout=50)[0] == 0


@pytest.mark.parametrize(("lora", "rate"), [((), 5e-6), (("--lora", "8"), 1e-4)])
def test_preferences_take_a_tenth_of_the_rate(lora, rate):
    pairs = ["--init", "m.gguf", "--data", "pairs.jsonl", "--loss", "dpo"]
    assert parse([*pairs, *lora]).lr == pytest.approx(rate)
    assert parse([*pairs, *lora, "--lr", "1e-3"]).lr == 1e-3


@needs_mpiexec
def test_a_sample_answers_the_first_question_that_is_held_out(folder):
    model(folder, 128)
    train(1, folder / "out", *FLAGS[:6], "--val-data", "chat.jsonl", "--steps", "1", "--sample", "5")
    records = map(json.loads, (folder / "out" / "events.jsonl").read_text().splitlines())
    ((prompt, text),) = ((e["prompt"], e["text"]) for e in records if e["event"] == "sample")
    assert TALK[0]["content"] in prompt == text[: len(prompt)]
    assert TALK[1]["content"] not in text
