"""Runs with `--packing documents` have the same bytes at any number of ranks and after an interruption."""

import json

import numpy as np
import pytest
from jobs import COMPILED, run_job
from test_command_bits import assert_same_run, fields, needs_mpiexec, train_compiled

from zero_mpi.launch.ending import REQUEUE

pytestmark = needs_mpiexec

SMALL = ["--layers", "1", "--dim", "24", "--heads", "3", "--kv-heads", "1", "--ffn", "17", "--context", "32"]
SMALL += ["--batch-size", "6", "--micro-batch", "2", "--warmup", "2", "--sample", "0"]
SMALL += ["--val-fraction", "0.1", "--eval-every", "1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(0)
    for number in range(60):
        (folder / f"{number:02}.txt").write_text("".join(rng.choice(list("abcd \n"), rng.integers(1, 100))))
    return ["--data", str(folder)]


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "out"
    return out, train_compiled(1, out, *SMALL, *data, "--packing", "documents", "--steps", "4")


@pytest.mark.parametrize(("ranks", "strategy"), [(3, "full-shard"), (2, "no-shard")])
def test_ranks_strategies_and_a_resume_change_no_bit(ranks, strategy, alone, data, tmp_path):
    out = tmp_path / "out"
    flags = [*SMALL, *data, "--packing", "documents", "--strategy", strategy]
    first = ["-m", "zero_mpi.train", "--out", str(out), *flags, "--steps", "4", "--max-time", "0s"]
    assert run_job(ranks, first, timeout=50, env=COMPILED, cwd=tmp_path)[0] == REQUEUE
    train_compiled(ranks + 2, out, *flags, "--steps", "4")
    assert_same_run(out, alone[0])
    assert fields(out, "val_loss", "tokens") == fields(alone[0], "val_loss", "tokens")


def test_it_says_how_documents_are_packed_and_counts_what_is_learned(alone):
    out, printed = alone
    (line,) = [line for line in printed.splitlines() if line.startswith("packed:")]
    assert "documents and parts of long ones in" in line
    assert line.endswith("% full")
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    tokens = np.diff([0, *(record["tokens"] for record in records)])
    assert all(0.8 * 6 * 32 < count <= 6 * 32 for count in tokens)
    assert len(set(tokens)) > 1
    assert not any("mfu" in record for record in records), "no MFU: the work depends on documents"
