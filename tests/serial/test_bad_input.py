"""Bad usage and bad input end with status 2; one line of rank 0 names the cause and the remedy."""

import gzip
import re
from pathlib import Path

import numpy as np
import pytest
from gguf_files import write_raw
from jobs import run_job
from test_command_bits import needs_mpiexec, train, write_text

from zero_mpi.errors import UsageError
from zero_mpi.launch.ending import BAD_USAGE
from zero_mpi.launch.world import World
from zero_mpi.train import command as train_command

pytestmark = needs_mpiexec
SMALL = ["--layers", "1", "--dim", "24", "--heads", "3", "--ffn", "17", "--context", "16", "--steps", "1"]
SMALL += ["--batch-size", "2", "--micro-batch", "1", "--sample", "0"]


@pytest.fixture(scope="module")
def things(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("things")
    Path(write_text(folder, documents=1)[0]).rename(folder / "text")
    train(1, folder / "run", "--data", "text", *SMALL)
    content = (folder / "run" / "latest" / "model.gguf").read_bytes()
    (folder / "model.gguf").write_bytes(content)
    write_raw(folder / "mamba.gguf", "mamba", {}, [("token_embd.weight", (4, 4))])
    (folder / "unknown.toml").write_text("stepz = 3\n")
    (folder / "sound.toml").write_text("steps = 1\n")
    np.save(folder / "ids.npy", np.array([1, 2, 3] * 50, np.uint16))
    np.save(folder / "high.npy", np.array([1, 2, 999] * 50, np.uint16))
    (folder / "wide.txt").write_text("A text with two bytes for each letter. " * 9, "utf-16")
    (folder / "binary-folder").mkdir()
    (folder / "binary-folder" / "text.gz").write_bytes(gzip.compress(b"text"))
    return folder


def refusal(ranks: int, flags: list[str], folder: Path, out: Path) -> str:
    """Return the error line of a refused job, after a check that it saved no checkpoint."""
    job = ["-m", "zero_mpi.train", "--out", str(out), *flags]
    status, printed, errors = run_job(ranks, job, cwd=folder, timeout=20)
    assert (status, printed, errors.count("\n")) == (2, "", 1), f"status {status}\n{printed}\n{errors}"
    assert errors.startswith("zero_mpi train: error: ")
    assert errors.endswith("\n")
    assert not list(out.glob("step-*"))
    return errors


TEXT = ["--data", "text"]
MODEL = ["--init", "model.gguf"]
# A few cases of each kind; further cases are in test_corpus.py, test_kinds.py, test_models.py,
# test_config.py, test_combinations.py and test_gguf_reader.py.
CASES = {
    "missing beside sound": (["--data", "text", "nowhere.txt"], "--data nowhere.txt "),
    "context of the data": ([*TEXT, "--context", "100000"], "context 100000 .*--context"),
    "UTF-16": (["--data", "text", "wide.txt"], "--data wide.txt .*UTF-16.*iconv -f UTF-16"),
    "binary files": (["--data", "binary-folder"], "binary-folder; .* 1 .*gzip"),
    "gpt2": ([*TEXT, "--arch", "gpt2", "--kv-heads", "1"], "--kv-heads 1: .*--arch llama"),
    "strategy": ([*TEXT, "--strategy", "foo"], "--strategy.*'foo'.*full-shard"),
    "freeze": ([*TEXT, "--freeze", "no.such.*"], r"--freeze.*no\.such\.\*"),
    "tokenizer": ([*TEXT, "--tokenizer", "from-init"], "--tokenizer from-init .*--init"),
    "tokenizer of text": ([*TEXT, "--tokenizer", "text"], "text: "),
    "vocab-size of text": ([*TEXT, "--vocab-size", "300"], "--vocab-size"),
    "run folder": ([*TEXT, "--init", "run"], "run: .*run/latest"),
    "architecture": ([*TEXT, "--init", "mamba.gguf"], "mamba.gguf: .*'mamba'.*llama, smollm3"),
    "context of a model": ([*TEXT, *MODEL, "--context", "32"], "--context 32: .* 16"),
    "kv-heads": ([*TEXT, *MODEL, "--kv-heads", "1"], "--kv-heads 1: .* --kv-heads 3"),
    "tied": ([*TEXT, *MODEL, "--tied"], "--tied: .* --no-tied"),
    "vocab-size": (["--data", "ids.npy", *MODEL, "--vocab-size", "9"], "--vocab-size 9: .* 260"),
    "dry run": ([*TEXT, *MODEL, "--layers", "2", "--dry-run"], "--layers 2: .*--init model.gguf"),
    "file in the way": ([*TEXT, "--out", "text"], "--out text: "),
    "no writing": ([*TEXT, "--out", "/proc/x"], "--out /proc/x: "),
    "no checkpoint": ([*TEXT, "--resume", "nosuchfolder"], "--resume nosuchfolder"),
    "another model": ([*TEXT, "--resume", "run/latest", "--dim", "48"], r"24, now 48 \(--dim\)"),
    "unknown key": (["--config", "unknown.toml"], "--config unknown.toml: 'stepz' .*steps"),
    "id": (["--data", "high.npy", "--vocab-size", "9"], "high.npy: id 999 .*--vocab-size"),
    "no vocab-size": (["--data", "ids.npy"], "--vocab-size"),
}
BY_A_JOB = ("UTF-16", "kv-heads", "no writing", "unknown key")


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_before_anything_is_done(case, things, tmp_path, monkeypatch, capfd):
    flags, expected = CASES[case]
    monkeypatch.chdir(things)
    world = World(0, 1)
    with pytest.raises(UsageError, match=f"(?s){expected}"):  # --timeout 0: no watchdog thread stays behind
        train_command.command(world, ["--timeout", "0", "--out", str(tmp_path / "out"), *SMALL, *flags])
    world.report_end(BAD_USAGE)
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.glob("out/step-*"))


@pytest.mark.parametrize("case", BY_A_JOB)
def test_one_line_and_status_2(case, things, tmp_path):
    flags, expected = CASES[case]
    assert re.search(expected, refusal(3, [*SMALL, *flags], things, tmp_path / "out"))


FAR_AWAY = """
import os
from mpi4py import MPI

if MPI.COMM_WORLD.rank == 2:
    os.chdir({folder!r})

from zero_mpi.train import command as train_command

train_command.main()
"""


def on_a_far_node(flags: list[str], things: Path, folder: Path) -> tuple[int, str, str]:
    """Run a job of three ranks whose last rank does not see the files in the shared folder."""
    script = folder / "far.py"
    script.write_text(FAR_AWAY.format(folder=str(folder)))
    job = [str(script), "--out", str(folder / "out"), *TEXT, *SMALL, *flags]
    return run_job(3, job, cwd=things, timeout=15)


def test_a_file_that_one_rank_cannot_see_is_told_once(things, tmp_path):
    status, printed, errors = on_a_far_node(["--init", "model.gguf"], things, tmp_path)
    assert (status, printed, errors.count("\n")) == (2, "", 1), errors
    assert "rank 2: model.gguf: no such file" in errors


def test_a_configuration_that_one_rank_cannot_see_does_not_hang(things, tmp_path):
    """Either rank 0 reads the file for all ranks, or all ranks refuse it."""
    status, _, errors = on_a_far_node(["--config", "sound.toml"], things, tmp_path)
    assert (status, errors.count("\n")) in [(0, 0), (2, 1)], errors
