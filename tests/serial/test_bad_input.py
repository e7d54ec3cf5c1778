"""Bad usage and bad input: one line from rank 0 that names the thing and the way out, status 2, nothing done.

Each case is refused in this process, one of each kind by jobs of one and of three ranks too. More of the same
are all of them on three ranks, where a fault is noticed by all, by rank 0 alone, or while the others wait.
"""

import gzip
import os
import re
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from jobs import run_job
from test_command_bits import needs_mpiexec, train, write_text

from zero_mpi.errors import UsageError
from zero_mpi.launch.ending import BAD_USAGE
from zero_mpi.launch.world import World
from zero_mpi.train import command as train_command

pytestmark = needs_mpiexec
SMALL = ["--layers", "1", "--dim", "24", "--heads", "3", "--ffn", "17", "--context", "16", "--steps", "1"]
SMALL += ["--batch-size", "2", "--micro-batch", "1", "--sample", "0"]


def ids(path: Path, values: list[int], dtype: type = np.uint16) -> None:
    np.save(path, np.array(values, dtype))


def model_file(path: Path, architecture: str) -> None:
    """A sound GGUF of any architecture, without what makes a model."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_configurations(folder: Path) -> None:
    """TOML files, each but one with a fault."""
    (folder / "broken.toml").write_text("steps = = 3\n")
    (folder / "unknown.toml").write_text("stepz = 3\n")
    (folder / "type.toml").write_text('steps = "three"\n')
    (folder / "sound.toml").write_text("steps = 1\n")
    (folder / "data.toml").write_text("data = [1]\n")


def write_what_is_no_text(folder: Path) -> None:
    """Files that a user may take for text."""
    (folder / "text.gz").write_bytes(gzip.compress((folder / "text").read_bytes()))
    (folder / "wide.txt").write_text("A text with two bytes for each letter. " * 9, "utf-16")
    (folder / "lines.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n' * 9)
    (folder / "table.parquet").write_bytes(b"PAR1\x15\x04\x15" + bytes(99) + b"PAR1")
    (folder / "binary").write_bytes(bytes(range(256)) * 9)
    (folder / "binary-folder").mkdir()
    (folder / "binary-folder" / "text.gz").write_bytes(gzip.compress(b"text"))


@pytest.fixture(scope="module")
def things(tmp_path_factory) -> Path:
    """A folder of sound and of broken things, in which the commands run; only read by the tests."""
    folder = tmp_path_factory.mktemp("things")
    Path(write_text(folder, documents=1)[0]).rename(folder / "text")
    train(1, folder / "run", "--data", "text", *SMALL)
    whole = (folder / "run" / "latest" / "model.gguf").read_bytes()
    (folder / "model.gguf").write_bytes(whole)
    (folder / "truncated.gguf").write_bytes(whole[:-100])
    (folder / "header.gguf").write_bytes(whole[:40])
    model_file(folder / "mamba.gguf", "mamba")
    model_file(folder / "partial.gguf", "llama")
    (folder / "empty").touch()
    (folder / "empty-folder").mkdir()
    os.mkfifo(folder / "pipe")
    write_configurations(folder)
    ids(folder / "ids.npy", [1, 2, 3] * 50)
    ids(folder / "wide.npy", [1, 2, 3] * 50, np.int64)
    ids(folder / "high.npy", [1, 2, 999] * 50)
    (folder / "fake.npy").write_text("no numpy file")
    write_what_is_no_text(folder)
    return folder


def refusal(ranks: int, flags: list[str], folder: Path, out: Path) -> str:
    """The one line, after seeing that it is one and that nothing was done."""
    job = ["-m", "zero_mpi.train", "--out", str(out), *flags]
    status, printed, errors = run_job(ranks, job, cwd=folder, timeout=20)
    assert (status, printed, errors.count("\n")) == (2, "", 1), f"status {status}\n{printed}\n{errors}"
    assert errors.startswith("zero_mpi train: error: ")
    assert errors.endswith("\n")
    assert not list(out.glob("step-*"))
    return errors


TEXT = ["--data", "text"]
NO_DATA = {
    "missing file": (["--data", "nowhere.txt"], "--data nowhere.txt does not exist"),
    "missing beside sound": (["--data", "text", "nowhere.txt"], "--data nowhere.txt does not exist"),
    "empty file": (["--data", "empty"], "--data .*empty"),
    "empty folder": (["--data", "empty-folder"], "--data .*empty-folder"),
    "pipe": (["--data", "pipe"], "--data pipe is neither a file nor a folder"),
    "context": ([*TEXT, "--context", "100000"], "context 100000 .*--context or more --data"),
}
NO_TEXT = {
    "gzip": (["--data", "text.gz"], "--data text.gz looks like gzip, which is no text: .*gunzip"),
    "UTF-16": (["--data", "text", "wide.txt"], "--data wide.txt looks like text in UTF-16.*iconv -f UTF-16"),
    "JSON Lines": (["--data", "lines.jsonl"], "--data lines.jsonl looks like JSON Lines.*jq -r .text"),
    "Parquet": (
        ["--data", "table.parquet"],
        "--data table.parquet looks like a Parquet file.*zero-mpi tokenize",
    ),
    "a model": (["--data", "model.gguf"], "--data model.gguf looks like a GGUF model.*--init"),
    "binary": (["--data", "binary"], "--data binary looks like binary data.*UTF-8"),
    "a folder of them": (["--data", "binary-folder"], "no text .*: binary-folder; .* left out: 1 .*gzip"),
}
SIZES = {
    "heads": ([*TEXT, "--heads", "5"], "--heads 5 does not divide --dim 24"),
    "kv-heads": ([*TEXT, "--kv-heads", "2"], "--kv-heads 2 does not divide --heads 3"),
    "kv-heads of gpt2": ([*TEXT, "--arch", "gpt2", "--kv-heads", "1"], "--kv-heads 1: .*--arch llama"),
    "odd head": ([*TEXT, "--dim", "9", "--heads", "3"], "--dim 9 / --heads 3 = 3 is odd"),
    "ffn": ([*TEXT, "--ffn", "0"], "--ffn 0: expected at least 1"),
    "batch-size": ([*TEXT, "--batch-size", "0"], "--batch-size 0: expected at least 1"),
    "micro-batch": ([*TEXT, "--micro-batch", "0"], "--micro-batch 0: expected at least 1"),
}
FLAGS = {
    "unknown flag": ([*TEXT, "--no-such-flag"], "--no-such-flag"),
    "stray word": (["stray"], "stray"),
    "strategy": ([*TEXT, "--strategy", "foo"], "--strategy.*'foo'.*full-shard"),
    "arch": ([*TEXT, "--arch", "foo"], "--arch.*'foo'.*llama"),
    "schedule": ([*TEXT, "--schedule", "foo"], "--schedule.*'foo'.*cosine"),
    "no number": ([*TEXT, "--steps", "many"], "--steps.*'many'"),
    "no value": (["--steps"], "--steps.*expected one argument"),
    "seed": ([*TEXT, "--seed", "-1"], "--seed -1: expected at least 0"),
    "val-fraction": ([*TEXT, "--val-fraction", "1"], "--val-fraction 1.0: expected less than 1"),
    "threads": ([*TEXT, "--threads", "zero"], "--threads zero: expected a number"),
    "max-time": ([*TEXT, "--max-time", "soon"], "--max-time soon: expected a duration such as 3h50m"),
    "max-time of dots": ([*TEXT, "--max-time", "1.2.3m"], "--max-time 1.2.3m: expected a duration"),
    "bucket-mb": ([*TEXT, "--strategy", "no-shard", "--bucket-mb", "nan"], "--bucket-mb nan"),
    "many threads": ([*TEXT, "--threads", "100000"], "--threads 100000: this rank may run on .* core"),
    "min-lr": ([*TEXT, "--min-lr", "1"], "--min-lr 1.0: expected at most --lr 0.004"),
    "trace-steps": ([*TEXT, "--trace-steps", "1:2"], "--trace-steps 1:2: .*give --trace FILE"),
    "empty": (["--data", ""], "--data '': expected something, found an empty text"),
    "freeze": ([*TEXT, "--freeze", "no.such.*"], r"--freeze.*no\.such\.\*"),
    "tokenizer": ([*TEXT, "--tokenizer", "from-init"], "--tokenizer from-init needs --init"),
    "tokenizer file": ([*TEXT, "--tokenizer", "nowhere.json"], "--tokenizer nowhere.json: there is no such"),
    "tokenizer of text": ([*TEXT, "--tokenizer", "text"], "text: .*expected a GGUF file"),
    "checkpoint-io": ([*TEXT, "--checkpoint-io", "foo"], "--checkpoint-io.*'foo'.*gather.*parallel"),
    "vocab-size": ([*TEXT, "--vocab-size", "300"], "--vocab-size is for token files"),
}
INITS = {
    "no GGUF": ([*TEXT, "--init", "text"], "text: .*expected a GGUF file"),
    "empty": ([*TEXT, "--init", "empty"], "empty: expected a GGUF file"),
    "missing": ([*TEXT, "--init", "nowhere.gguf"], "nowhere.gguf: no such file"),
    "folder": ([*TEXT, "--init", "run"], "run: expected model.gguf, or config.json.*run/latest"),
    "truncated": ([*TEXT, "--init", "truncated.gguf"], "truncated.gguf: .*found the end of the file"),
    "truncated header": ([*TEXT, "--init", "header.gguf"], "header.gguf: "),
    "architecture": ([*TEXT, "--init", "mamba.gguf"], "mamba.gguf: architecture 'mamba'.*llama, gpt2"),
    "not a whole model": ([*TEXT, "--init", "partial.gguf"], "partial.gguf: "),
    "context": ([*TEXT, "--init", "model.gguf", "--context", "32"], "--context 32: the model .* has 16"),
}
MODEL = ["--init", "model.gguf"]
OTHER_SIZES = {
    "layers": (
        [*TEXT, *MODEL, "--layers", "2"],
        "--layers 2: the model of --init model.gguf has --layers 1;",
    ),
    "heads": ([*TEXT, *MODEL, "--heads", "2"], "--heads 2: .* has --heads 3"),
    "kv-heads": ([*TEXT, *MODEL, "--kv-heads", "1"], "--kv-heads 1: .* has --kv-heads 3"),
    "ffn": ([*TEXT, *MODEL, "--ffn", "18"], "--ffn 18: .* has --ffn 17"),
    "arch": ([*TEXT, *MODEL, "--arch", "gpt2"], "--arch gpt2: .* has --arch llama"),
    "tied": ([*TEXT, *MODEL, "--tied"], "--tied: .* has --no-tied"),
    "vocab-size": (["--data", "ids.npy", *MODEL, "--vocab-size", "9"], "--vocab-size 9: .* --vocab-size 260"),
    "dry run": ([*TEXT, *MODEL, "--layers", "2", "--dry-run"], "--layers 2: the model of --init model.gguf"),
}
PLACES = {
    "a file in the way": ([*TEXT, "--out", "text"], "--out text: cannot write there"),
    "a file above": ([*TEXT, "--out", "text/run"], "--out text/run: cannot write there"),
    "no writing there": ([*TEXT, "--out", "/proc/x"], "--out /proc/x: cannot write there"),
    "no checkpoint": (
        [*TEXT, "--resume", "nosuchfolder"],
        "--resume nosuchfolder: .*auto, never or a folder",
    ),
    "no checkpoint in it": ([*TEXT, "--resume", "empty-folder"], "empty-folder.*no such file"),
    "another model": (
        [*TEXT, "--resume", "run/latest", "--dim", "48"],
        r"embedding_length was 24, now 48 \(--dim\);",
    ),
}
FILES = {
    "missing": (["--config", "nowhere.toml"], "--config nowhere.toml: no such file"),
    "no TOML": (["--config", "text"], "--config text: not a TOML file"),
    "broken": (["--config", "broken.toml"], "--config broken.toml: not a TOML file"),
    "unknown key": (["--config", "unknown.toml"], "--config unknown.toml: 'stepz' .*; did you mean steps"),
    "wrong type": (["--config", "type.toml"], "--config type.toml: steps = 'three', expected int"),
    "wrong item": (["--config", "data.toml"], r"--config data.toml: data = \[1\], expected"),
}
TOKENS = {
    "dtype": (["--data", "wide.npy", "--vocab-size", "9"], "wide.npy: .*uint16 or uint32 ids, found int64"),
    "id": (["--data", "high.npy", "--vocab-size", "9"], "high.npy: id 999 .*larger --vocab-size"),
    "no vocab-size": (["--data", "ids.npy"], "token files need --vocab-size"),
    "no token file": (["--data", "fake.npy", "--vocab-size", "9"], "fake.npy"),
    "text and tokens": (["--data", "ids.npy", "text"], "text or token files, not both"),
}
GROUPS = {
    "data": NO_DATA,
    "no text": NO_TEXT,
    "sizes of a model": OTHER_SIZES,
    "sizes": SIZES,
    "flags": FLAGS,
    "init": INITS,
    "places": PLACES,
    "config": FILES,
    "tokens": TOKENS,
}
CASES = [
    pytest.param(flags, expected, id=f"{group}: {name}")
    for group, cases in GROUPS.items()
    for name, (flags, expected) in cases.items()
]
ONE_OF_EACH = [next(iter(cases.values())) for cases in GROUPS.values()]


@pytest.mark.parametrize(("flags", "expected"), CASES)
def test_it_is_refused_before_anything_is_done(flags, expected, things, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(things)
    world = World(0, 1)
    with pytest.raises(UsageError, match=f"(?s){expected}"):  # without a watchdog, which would stay
        train_command.command(world, ["--timeout", "0", "--out", str(tmp_path / "out"), *SMALL, *flags])
    world.tell(BAD_USAGE)
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.glob("out/step-*"))


@pytest.mark.parametrize(("flags", "expected"), ONE_OF_EACH, ids=GROUPS)
def test_one_line_and_status_2(flags, expected, things, tmp_path):
    assert re.search(expected, refusal(3, [*SMALL, *flags], things, tmp_path / "out"))


@pytest.mark.long
@pytest.mark.parametrize(("flags", "expected"), CASES)
def test_the_same_of_all_on_three_ranks(flags, expected, things, tmp_path):
    assert re.search(expected, refusal(3, [*SMALL, *flags], things, tmp_path / "out"))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


@pytest.mark.parametrize("name", ["model.gguf", "optimizer.gguf"])
@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_a_corrupt_checkpoint_is_named_and_left_alone(damage, name, things, tmp_path):
    """`auto` does not begin anew where a checkpoint is: the user says what is to be done about it."""
    out = shutil.copytree(things / "run", tmp_path / "out", symlinks=True)
    damage(out / "latest" / name)
    job = ["-m", "zero_mpi.train", "--out", str(out), *TEXT, *SMALL, "--steps", "2"]
    status, printed, errors = run_job(3, job, cwd=things, timeout=20)
    assert (status, printed, errors.count("\n")) == (2, "", 1), errors
    assert name in errors
    assert (out / "metrics.jsonl").read_bytes() == (things / "run" / "metrics.jsonl").read_bytes()
    assert "--resume" in errors, "the way out"


FAR_AWAY = """
import os
from mpi4py import MPI

if MPI.COMM_WORLD.rank == 2:
    os.chdir({folder!r})

from zero_mpi.train import command as train_command

train_command.main()
"""


def on_a_far_node(flags: list[str], things: Path, folder: Path) -> tuple[int, str, str]:
    """A job of three ranks, the last of which does not see the shared folder."""
    script = folder / "far.py"
    script.write_text(FAR_AWAY.format(folder=str(folder)))
    job = [str(script), "--out", str(folder / "out"), *TEXT, *SMALL, *flags]
    return run_job(3, job, cwd=things, timeout=15)


def test_a_file_that_one_rank_cannot_see_is_told_once(things, tmp_path):
    status, printed, errors = on_a_far_node(["--init", "model.gguf"], things, tmp_path)
    assert (status, printed, errors.count("\n")) == (2, "", 1), errors
    assert "rank 2: model.gguf: no such file" in errors


def test_a_configuration_that_one_rank_cannot_see_does_not_hang(things, tmp_path):
    """Rank 0 may read it for all, or all may refuse it."""
    status, _, errors = on_a_far_node(["--config", "sound.toml"], things, tmp_path)
    assert (status, errors.count("\n")) in [(0, 0), (2, 1)], errors
