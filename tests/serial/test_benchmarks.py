"""The benchmarks run and print their tables; how fast they are is not for a test to say."""

import re
import sys
from pathlib import Path

import pytest
from jobs import run_command, run_job
from oracles import smollm2
from test_command_bits import needs_mpiexec

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


SCRIPT = BENCHMARKS / "checkpoint.py"
ROW = re.compile(
    r"(?P<name>\S.*?)  +(?P<speed>\d+\.\d+) +(?P<ratio>\d+\.\d+) +\d+\.\d+\.\.\d+\.\d+ +(?P<seconds>\d+\.\d+)"
)
ROWS = ["plain write and fsync", "save, gather", "save, parallel", "save, async: held up"]
ROWS += ["save, async: complete", "plain read, page cache", "load, page cache", "plain read, cache dropped"]
ROWS += ["load, cache dropped"]


@needs_mpiexec
@pytest.mark.parametrize(("ranks", "more"), [(2, ["--warm-memory"])])
def test_checkpoint_prints_its_table_and_leaves_nothing_behind(ranks, more, tmp_path):
    flags = ["--mb", "0.5", "--repeats", "2", "--folder", tmp_path, *more]
    status, printed, errors = run_job(ranks, [SCRIPT, *flags], timeout=60)
    assert (status, errors) == (0, ""), printed
    first, _, *rows, disk, index = printed.splitlines()
    assert re.match(rf"\d+ MB of state .*, {ranks} ranks?, 2 repeats, on \S+$", first)
    found = [ROW.fullmatch(row) for row in rows]
    assert [match and match["name"] for match in found] == ROWS
    assert all(float(match["speed"]) + float(match["seconds"]) > 0 for match in found)  # one may round to 0
    assert [match["ratio"] for match in found if match["name"].startswith("plain")] == ["1.00"] * 3
    assert re.match(r"of the last load, \d+% came from the disk$", disk)
    assert re.match(r"index of SmolLM2-135M: (\d\.\d+ s|not measured)", index)
    assert list(tmp_path.iterdir()) == []


@needs_mpiexec
def test_calls_of_a_checkpoint_are_counted(tmp_path):
    """As on Lustre with two nodes of two ranks: the first of each writes, and the kernel counts the same."""
    flags = ["--mb", "0.5", "--ranks-per-node", "2", "--system", "lustre", "--folder", tmp_path]
    status, printed, errors = run_job(4, [BENCHMARKS / "checkpoint_calls.py", *flags], timeout=60)
    assert (status, errors) == (0, ""), printed
    first, head, *rows, total, each = printed.splitlines()
    assert re.fullmatch(r"2 files of \d+ tensors, 2 nodes: 2 of 4 ranks write, on lustre", first)
    columns = head.split()
    by_rank = [dict(zip(columns, map(float, row.split()), strict=True)) for row in rows]
    assert [(row["rank"], row["node"], row["pwritev"] > 0) for row in by_rank] == [
        (0, 0, True), (1, 0, False), (2, 1, True), (3, 1, False)
    ]  # fmt: skip
    assert [row["fsync"] for row in by_rank] == [5, 0, 2, 0]  # rank 0: two files, and folders thrice
    assert [row["open"] for row in by_rank if not row["pwritev"]] == [0, 0]
    assert re.fullmatch(r" +all( +\d+){10} +\d+\.\d\d +\d+", total)
    assert re.fullmatch(r"\d+\.\d\d MB a write", each)
    assert list(tmp_path.iterdir()) == []


@needs_mpiexec
def test_steps_are_timed_for_each_variant():
    flags = ["--workload", "W3", "--layers", "1", "--steps", "2", "--warmup", "1"]
    variants = ["--strategy", "full-shard", "no-shard", "--transport", "mpi", "shared"]
    variants += ["--precision", "fp32", "bf16"]
    status, printed, errors = run_job(2, [BENCHMARKS / "step.py", *flags, *variants], timeout=60)
    assert (status, errors) == (0, "")
    head, columns, *rows = printed.splitlines()
    assert re.match(r"W3, 2 rank\(s\), sgemm \d+ GFLOP/s per rank$", head)
    assert columns.split()[-3:] == ["of", "all", "activations"]
    cells = [row.split() for row in rows]
    assert [(row[1], row[0], row[3]) for row in cells] == [
        (transport, strategy, precision)
        for transport in ("mpi", "shared")
        for strategy in ("full-shard", "no-shard")
        for precision in ("fp32", "bf16")
    ]
    assert {row[4] for row in cells} == {"native"}
    assert all(float(cell) > 0 for row in cells for cell in row[5:8])


@needs_mpiexec
def test_sizes_are_swept():
    command = [sys.executable, BENCHMARKS / "scaling.py", "--sweep", "layers", "--most", "1", "--steps", "1"]
    status, printed, errors = run_command(command, timeout=60)
    assert (status, errors) == (0, "")
    head, row = printed.splitlines()
    assert head.startswith("layers, full-shard")
    assert row.startswith("--workload W3 --layers 4 ")
    assert len(row.split()) == 4 + 8


@needs_mpiexec
@pytest.mark.parametrize("ranks", [2])
def test_collectives_are_timed_by_size(ranks):
    flags = ["--least-kb", "1", "--most-mb", "1", "--budget", "0.02"]
    status, printed, errors = run_job(ranks, [BENCHMARKS / "collectives.py", *flags], timeout=60)
    assert (status, errors) == (0, "")
    rows = [line.split() for line in printed.splitlines()[3:]]
    assert [row[0] for row in rows] == ["1", "4", "16", "64", "256", "1024"]
    assert all(len(row) == 10 and float(cell) >= 0 for row in rows for cell in row)


@needs_mpiexec
def test_losses_of_two_precisions_are_compared(tmp_path):
    (tmp_path / "text").write_text("what is read here is of no matter " * 200)
    flags = ["--workload", "W3", "--steps", "3", "--ranks", "1", "--", "--data", str(tmp_path / "text")]
    command = [sys.executable, BENCHMARKS / "losses.py", *flags, "--layers", "1", "--eval-windows", "2"]
    status, printed, errors = run_command(command, timeout=50)
    assert (status, errors) == (0, "")
    found = re.fullmatch(
        r"W3: 3 steps, losses 5\.\d+ to \d\.\d+, at most (0\.\d+) apart \(step \d\); "
        r"validation (\d\.\d+) fp32, (\d\.\d+) bf16, [+-]\d\.\d+ %\n",
        printed,
    )
    assert found, printed
    apart, *held_out = map(float, found.groups())
    assert apart < 0.01
    assert held_out[0] == pytest.approx(held_out[1], rel=0.005)


@pytest.mark.parametrize("more", [[], ["--lines"]])
def test_tokenizers_are_timed(more):
    pytest.importorskip("tokenizers", reason="the package tokenizers is not installed", exc_type=ImportError)
    flags = ["--megabytes", "0", "--vocabulary", "500", "--rounds", "1", *more]
    status, printed, errors = run_command([sys.executable, BENCHMARKS / "encode.py", *flags], timeout=120)
    assert (status, errors) == (0, "")
    row = r".{24}  +\d+\.\d MB/s, tokenizers +\d+\.\d MB/s, ratio +\d+\.\d\d; (\d+) and (\d+) ids"
    first, *rows = printed.splitlines()
    assert re.match(r"\d+\.\d million letters in \d+ documents", first)
    found = [re.fullmatch(row, line) for line in rows]
    assert len(found) == 3
    assert all(match and match[1] == match[2] != "0" for match in found), printed


def test_conversations_are_timed():
    pytest.importorskip("transformers", reason="no transformers to compare with")
    command = [sys.executable, BENCHMARKS / "conversations.py", smollm2(), "--rows", "5", "--rounds", "1"]
    status, printed, errors = run_command(command, timeout=50)
    assert status == 0, errors
    ours, theirs = re.findall(r" ([\d,]+) ids ", printed)
    assert ours == theirs != "0"
    assert re.fullmatch(r"ratio \d+\.\d\d", printed.splitlines()[-1])
