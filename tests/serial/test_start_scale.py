"""The cost of a start hardly increases with the number of ranks."""

import json
import sys
from pathlib import Path

import pytest
from jobs import run_command
from test_command_bits import write_text

TESTS = Path(__file__).resolve().parents[1]
SCRIPT, PACKAGE = TESTS / "pretended_ranks.py", TESTS.parent / "zero_mpi"
FLAGS = ["--layers", "12", "--dim", "32", "--heads", "2", "--ffn", "64", "--context", "16"]
FLAGS += ["--batch-size", "4096", "--micro-batch", "1", "--steps", "3", "--sample", "0"]
FEW, MORE, MOST = 64, 1024, 4096
HEARD = 1700  # maximum received bytes per additional rank: 22 agreements, its process and its host
KEPT = 400  # maximum bytes kept per additional rank: borders of its shards, its process and its host


def begun(ranks, folder):
    folder.mkdir()
    data = write_text(folder)
    command = [sys.executable, SCRIPT, str(ranks), *FLAGS, "--data", *data]
    status, printed, errors = run_command(command, timeout=60, cwd=folder)
    assert status == 0, errors
    report = json.loads(printed.splitlines()[-1])
    assert report["ranks"] == ranks
    return report


@pytest.mark.timeout_seconds(120)
def test_what_a_start_costs_a_rank_hardly_grows_with_the_ranks(tmp_path, quick):
    ranks = MORE if quick else MOST
    first, many = begun(FEW, tmp_path / "few"), begun(ranks, tmp_path / "more")
    sources = len(list(PACKAGE.rglob("*.py")))  # rank 0 reads each source file once to compare it over ranks
    assert sources < first["files"] < sources + 200
    assert many["messages"] == first["messages"]
    assert abs(many["files"] - first["files"]) <= 20  # the number of sign-of-life files depends on the clock
    assert abs(many["said"] - first["said"]) <= 64  # messages have numbers with more digits
    assert many["heard"] - first["heard"] <= HEARD * (ranks - FEW)
    assert many["kept"] - first["kept"] <= KEPT * (ranks - FEW)
