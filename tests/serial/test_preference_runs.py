"""Runs with preference losses have the same bytes at any number of ranks and after an interruption."""

import json

import numpy as np
import pytest
from gguf_files import write_tensors
from jobs import COMPILED, run_job
from test_chat import TEMPLATE
from test_command_bits import fields, needs_mpiexec, train_compiled

from zero_mpi.data import ByteTokenizer
from zero_mpi.launch.ending import REQUEUE
from zero_mpi.models import Llama

pytestmark = needs_mpiexec
SIZES = {"layers": 1, "dim": 24, "heads": 3, "kv_heads": 1, "ffn": 17, "context": 96, "vocab_size": 260}
OF_ROWS = ["--chat-template", "t.jinja", "--skip-bad"]
FLAGS = ["--init", "m.gguf", "--data", "pairs.jsonl", "--context", "90", "--batch-size", "5", *OF_ROWS]
FLAGS += ["--micro-batch", "2", "--val-fraction", "0.2", "--eval-every", "1", "--sample", "0", "--steps", "3"]
FIELDS = ("loss", "grad_norm", "val_loss", "rewards/margins", "val_rewards/margins", "logps/chosen")
RUNS = {"dpo": ["--lora", "2", "--patience", "9"], "ipo": [], "orpo": ["--lora", "2"], "kto": ["--lora", "2"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place, rng, config = tmp_path_factory.mktemp("pairs"), np.random.default_rng(0), Llama.from_flags(SIZES)
    (place / "t.jinja").write_text(TEMPLATE)
    weights = {
        name: (rng.normal(0, 0.1, param.shape) + ("norm" in name)).astype(np.float32)
        for name, param in config.params().items()
    }
    write_tensors(place / "m.gguf", config.arch, config.metadata() | ByteTokenizer().metadata(), weights)
    words = ["".join(rng.choice(list("abcd"), n)) for n in rng.integers(1, 9, 90)]
    rows = [
        dict(zip(("prompt", "chosen", "rejected"), words[i : i + 3], strict=True)) for i in range(0, 90, 3)
    ]
    (place / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return place


@pytest.mark.parametrize(("loss", "ranks"), [("dpo", 2), ("ipo", 3), ("orpo", 5), ("kto", 3)])
def test_ranks_and_a_resume_change_no_bit_and_it_is_verified(loss, ranks, folder):
    flags = [*FLAGS, "--loss", loss, *RUNS[loss]]
    single, out = folder / f"{loss}-1", folder / f"{loss}-{ranks}"
    output = train_compiled(1, single, *flags)
    assert ("the best validation loss is 0." in output, "nats per token" in output) == (loss == "dpo", False)
    first = ["-m", "zero_mpi.train", "--out", str(out), *flags, "--max-time", "0s"]
    assert run_job(ranks, first, timeout=50, env=COMPILED, cwd=folder)[0] == REQUEUE
    assert (out / "reference.bin").exists() == (loss == "ipo")
    if loss == "ipo":
        (out / "reference.bin").write_bytes(b"damaged")  # verify recomputes it from the initial weights
    train_compiled(ranks - 1, out, *flags, "--strategy", "shard-grad-op")
    for file in sorted((single / "latest").iterdir()):
        assert (out / "latest" / file.name).read_bytes() == file.read_bytes(), file.name
    assert fields(out, *FIELDS) == fields(single, *FIELDS)
    status, printed, _ = run_job(2, ["-m", "zero_mpi", "verify", str(out)], env=COMPILED, cwd=folder)
    assert (status, printed.splitlines()[-1][:4]) == (0, "yes:")


def test_the_first_step_compares_a_model_with_itself(folder):
    records = [json.loads(line) for line in (folder / "dpo-1" / "metrics.jsonl").read_text().splitlines()]
    assert records[0]["loss"] == pytest.approx(np.log(2), rel=1e-12)
    assert [records[0][f"rewards/{name}"] for name in ("chosen", "margins", "accuracies")] == [0, 0, 0]
    assert records[0]["val_loss_before"] > records[-1]["val_loss"]


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--loss", "dpo", "--data", "pairs.jsonl=1"], "--loss dpo"),
        (["--loss", "dpo", "--data", "pairs.jsonl", "--preference-beta", "0"], "--preference-beta 0"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(flags, name, folder):
    command = ["-m", "zero_mpi.train", "--init", "m.gguf", "--out", "no", *OF_ROWS, *flags]
    status, _, errors = run_job(1, command, env=COMPILED, cwd=folder)
    assert (status, len(errors.strip().splitlines())) == (2, 1)
    assert name in errors


def test_samples_shows_both_sides_of_a_pair(folder):
    flags = ["samples", *FLAGS[1:4], "--json", "--count", "1", "--chat-template", "t.jinja"]
    _, printed, _ = run_job(1, ["-m", "zero_mpi", *flags], env=COMPILED, cwd=folder)
    report = json.loads(printed)
    row = json.loads((folder / "pairs.jsonl").read_text().splitlines()[0])
    names = [f"pairs.jsonl:1 {side}" for side in row if side != "prompt"]
    assert [each["name"] for each in report["samples"]] == names
    counted = [part["text"] for each in report["samples"] for part in each["parts"] if part["counted"]]
    assert counted == [f"{row['chosen']};", f"{row['rejected']};"]
