"""The train command gives the same bytes at any number of ranks and under any sharding settings.

Each row of TABLE is one job. Its `loss` and `grad_norm` fields are compared as text, and its two checkpoint
files as bytes, with those of the same training on one rank. The sizes are odd on purpose: a prime
feed-forward width, three heads on one key/value head, and a number of micro-batches that ranks do not divide.
"""

import functools
import json
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import architectures
import gguf
import numpy as np
import pytest
from jobs import COMPILED, REFERENCE, launcher, run_command, run_job

SIZES = ["--layers", "2", "--dim", "48", "--heads", "3", "--ffn", "97", "--context", "16"]
# With the default warm-up, weights would hardly change in three steps.
SETTINGS = ["--steps", "3", "--warmup", "2", "--sample", "0"]
MODELS = {
    "llama": ["--arch", "llama", "--kv-heads", "1"],
    "llama-tied": ["--arch", "llama", "--kv-heads", "1", "--tied"],
    "gpt2": ["--arch", "gpt2"],  # tied by default
    "gpt2-untied": ["--arch", "gpt2", "--no-tied"],
}
# Every pair of values of two columns is in some row; ranks and models occur in all combinations.
# Batches are "sequences a step / sequences a micro-batch": 5/1 is 5 micro-batches, 7/2 is 4 and 3/2 is 2.
TABLE = """
    ranks  transport  strategy       prefetch  recompute  bucket  model        batch
    2      shared     full-shard     2         yes        0.01    llama        5/1
    2      shared     shard-grad-op  1         no         25      llama-tied   7/2
    2      shared     no-shard       0         yes        25      gpt2         3/2
    2      mpi        no-shard       0         no         0.01    gpt2-untied  7/2
    3      shared     shard-grad-op  2         no         0.01    llama        3/2
    3      shared     no-shard       1         yes        0.01    llama-tied   5/1
    3      shared     full-shard     2         no         25      gpt2         7/2
    3      mpi        shard-grad-op  0         no         25      gpt2-untied  5/1
    4      shared     no-shard       1         yes        25      llama        7/2
    4      shared     full-shard     0         no         25      llama-tied   3/2
    4      shared     shard-grad-op  2         yes        0.01    gpt2         5/1
    4      mpi        full-shard     1         yes        25      gpt2-untied  3/2
    8      mpi        no-shard       0         no         25      llama        3/2
    8      mpi        full-shard     2         yes        0.01    llama-tied   5/1
    8      mpi        shard-grad-op  1         no         25      gpt2         7/2
    8      shared     no-shard       2         no         0.01    gpt2-untied  5/1
"""
HEADER, *ROWS = [tuple(row.split()) for row in TABLE.strip().splitlines()]


def no_launcher() -> bool:
    try:
        return not launcher()
    except FileNotFoundError:
        return True


needs_mpiexec = pytest.mark.skipif(no_launcher(), reason="no mpiexec")
pytestmark = needs_mpiexec


def write_text(folder: Path, documents: int = 4, seed: int = 0) -> list[str]:
    words = ["def", "return", "self", "for", "in", "x", "y", "(", ")", ":", "+", "\n"]
    draw = random.Random(seed)
    paths = [folder / f"text-{seed}-{number}.txt" for number in range(documents)]
    for path in paths:
        path.write_text(" ".join(draw.choices(words, k=250)))
    return [str(path) for path in paths]


def train(
    ranks: int,
    out: Path,
    *flags: str,
    script: Path | None = None,
    timeout: float = 50,
    operations: Mapping[str, str] = REFERENCE,
) -> str:
    start = [str(script)] if script else ["-m", "zero_mpi.train"]
    command = [*start, "--out", str(out), *flags]
    status, printed, errors = run_job(ranks, command, timeout=timeout, env=operations, cwd=out.parent)
    assert (status, errors) == (0, ""), f"status {status}\n{printed}\n{errors}"
    return printed


train_compiled = functools.partial(train, operations=COMPILED)  # as users run it


def fields(out: Path, *names: str) -> list[tuple[str, ...]]:
    keys = names or ("loss", "grad_norm")
    lines = (out / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_float=str, parse_int=str) for line in lines]
    return [tuple(record[name] for name in ("step", *keys)) for record in records]


def files(out: Path) -> dict[str, bytes]:
    return {name: (out / "latest" / name).read_bytes() for name in ("model.gguf", "optimizer.gguf")}


def assert_same_run(out: Path, reference: Path) -> None:
    assert fields(out) == fields(reference)
    actual, expected = files(out), files(reference)
    assert [name for name in expected if actual[name] != expected[name]] == []


def tensors(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}


Reference = Callable[[str, str], tuple[Path, list[str]]]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> list[str]:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def reference(text, tmp_path_factory) -> Reference:
    """Return a function of (model, batch) that returns the one-rank run and its flags."""
    folders: dict[tuple[str, str], Path] = {}

    def find(model: str, batch: str) -> tuple[Path, list[str]]:
        size, micro = batch.split("/")
        flags = ["--data", *text, *SIZES, *SETTINGS, *MODELS[model]]
        flags += ["--batch-size", size, "--micro-batch", micro]
        if (model, batch) not in folders:
            folders[model, batch] = tmp_path_factory.mktemp("one-rank") / "out"
            train_compiled(1, folders[model, batch], *flags)
        return folders[model, batch], flags

    return find


@pytest.mark.parametrize(HEADER, ROWS, ids=["-".join(row) for row in ROWS])
def test_same_bytes_as_on_one_rank(
    ranks, transport, strategy, prefetch, recompute, bucket, model, batch, reference, tmp_path
):
    expected, flags = reference(model, batch)
    flags += ["--strategy", strategy, "--prefetch", prefetch, "--bucket-mb", bucket]
    flags += ["--recompute"] if recompute == "yes" else []
    printed = train_compiled(int(ranks), tmp_path / "out", *flags, "--transport", transport)
    assert f"transport: {transport}" in printed
    assert_same_run(tmp_path / "out", expected)


@pytest.mark.timeout_seconds(180)
def test_more_ranks_than_rows(text, tmp_path):
    """Most of eight ranks own no element of some parameters: k and v have 2 rows, norms 6 elements."""
    flags = ["--data", *text, *SETTINGS, "--layers", "1", "--context", "16", "--batch-size", "3"]
    flags += ["--micro-batch", "1", "--dim", "6", "--heads", "3", "--kv-heads", "1", "--ffn", "5"]
    train_compiled(1, tmp_path / "one", *flags)
    train_compiled(8, tmp_path / "eight", *flags, "--strategy", "full-shard", "--bucket-mb", "0.01")
    shapes = {t.shape for t in tensors(tmp_path / "one" / "latest" / "model.gguf").values()}
    assert {(2, 6), (6,)} <= shapes
    assert_same_run(tmp_path / "eight", tmp_path / "one")


OTHERS = [arch for arch in architectures.ROWS if arch not in MODELS]


@pytest.mark.parametrize("arch", OTHERS)
def test_other_architectures_on_three_ranks(arch, text, tmp_path):
    flags = ["--data", *text, *SIZES, *SETTINGS, "--arch", arch, *architectures.ROWS[arch].flags]
    flags += ["--batch-size", "7", "--micro-batch", "2"]
    train_compiled(1, tmp_path / "one", *flags)
    train_compiled(3, tmp_path / "three", *flags, "--recompute", "--prefetch", "2")
    assert_same_run(tmp_path / "three", tmp_path / "one")


@pytest.mark.parametrize("strategy", ["full-shard", "shard-grad-op", "no-shard"])
@pytest.mark.parametrize(
    "how", [["--async-save"], ["--checkpoint-io", "parallel", "--writers-per-node", "2"]]
)
def test_however_a_checkpoint_is_written_it_is_the_same(how, strategy, reference, tmp_path):
    expected, flags = reference("llama-tied", "7/2")
    train_compiled(3, tmp_path / "out", *flags, *how, "--strategy", strategy, "--save-every", "1")
    assert_same_run(tmp_path / "out", expected)


def test_without_a_launcher_it_is_the_run_of_one_rank(reference, tmp_path):
    expected, flags = reference("llama", "7/2")
    command = [sys.executable, "-m", "zero_mpi.train", "--out", str(tmp_path / "out"), *flags]
    assert run_command(command, timeout=50, env=COMPILED, cwd=tmp_path)[::2] == (0, "")
    assert_same_run(tmp_path / "out", expected)


@pytest.mark.parametrize("strategy", ["full-shard", "shard-grad-op", "no-shard"])
def test_strategies_on_one_rank_are_the_same_run(strategy, reference, tmp_path):
    expected, flags = reference("gpt2", "7/2")
    train_compiled(1, tmp_path / "out", *flags, "--strategy", strategy, "--bucket-mb", "0.01")
    assert_same_run(tmp_path / "out", expected)


FROZEN = ("token_embd.weight", "blk.0.")  # prefixes of the names that the two patterns below match


def test_frozen_tensors_keep_their_initial_bits_and_the_others_train(text, tmp_path):
    out = tmp_path / "out"
    flags = ["--data", *text, *SIZES, *SETTINGS, "--batch-size", "7", "--micro-batch", "2"]
    flags += ["--freeze", "token_embd.*", "blk.0.*"]
    train_compiled(1, out, *flags)
    train_compiled(1, tmp_path / "start", *flags, "--steps", "0")
    before = tensors(tmp_path / "start" / "latest" / "model.gguf")
    after = tensors(out / "latest" / "model.gguf")
    assert list(before) == list(after)
    unchanged = {name for name in after if after[name].tobytes() == before[name].tobytes()}
    assert unchanged == {name for name in after if name.startswith(FROZEN)}
    assert 0 < len(unchanged) < len(after)
    moments = tensors(out / "latest" / "optimizer.gguf")
    assert len(moments) == 2 * (len(after) - len(unchanged))
    assert not [name for name in moments for frozen in unchanged if name.endswith(f".{frozen}")]
