"""The benchmarks run and print their tables; speed is not tested."""

import re
import sys
from pathlib import Path

import pytest
from jobs import run_command, run_job
from test_command_bits import needs_mpiexec

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

ROWS = ["plain write and fsync", "save, gather", "save, parallel", "save, async: held up"]
ROWS += ["save, async: complete", "plain read, page cache", "load, page cache", "plain read, cache dropped"]
ROWS += ["load, cache dropped"]


def printed_by(ranks, name, *flags, timeout=60):
    status, printed, errors = run_job(ranks, [BENCHMARKS / name, *flags], timeout=timeout)
    assert (status, errors) == (0, ""), printed
    return printed.splitlines()


def by_itself(name, *flags, says=False):
    """Return the lines of a program that starts its own ranks; says: stderr may contain text."""
    status, printed, errors = run_command([sys.executable, BENCHMARKS / name, *flags], timeout=120)
    assert status == 0, errors
    assert says or errors == ""
    return printed.splitlines()


@needs_mpiexec
def test_checkpoint_prints_its_table_and_leaves_nothing_behind(tmp_path):
    flags = ["--mb", "0.5", "--repeats", "2", "--folder", tmp_path, "--warm-memory"]
    _, _, *rows, _, _ = printed_by(2, "checkpoint.py", *flags)
    found = [re.fullmatch(r"(\S.*?)  +([\d.]+) +([\d.]+) +[\d.]+ +([\d.]+)", row) for row in rows]
    assert [match and match[1] for match in found] == ROWS
    assert all(float(match[2]) + float(match[4]) > 0 for match in found)  # each of them may round to 0
    assert [match[3] for match in found if match[1].startswith("plain")] == ["1.00"] * 3
    assert list(tmp_path.iterdir()) == []


@needs_mpiexec
def test_calls_of_a_checkpoint_are_counted(tmp_path):
    """On Lustre with two nodes of two ranks, the first rank of each node writes."""
    flags = ["--mb", "0.5", "--ranks-per-node", "2", "--system", "lustre", "--folder", tmp_path]
    _, head, *rows, _, _ = printed_by(4, "checkpoint_calls.py", *flags)
    columns = head.split()
    by_rank = [dict(zip(columns, map(float, row.split()), strict=True)) for row in rows]
    assert [(row["rank"], row["node"], row["pwritev"] > 0) for row in by_rank] == [
        (0, 0, True), (1, 0, False), (2, 1, True), (3, 1, False)
    ]  # fmt: skip
    assert [row["fsync"] for row in by_rank] == [
        5,
        0,
        2,
        0,
    ]  # rank 0 syncs two files, and folders three times
    assert [row["open"] for row in by_rank if not row["pwritev"]] == [0, 0]
    assert list(tmp_path.iterdir()) == []


@needs_mpiexec
def test_steps_are_timed_for_each_variant():
    flags = ["--workload", "W3", "--layers", "1", "--steps", "2", "--warmup", "1"]
    variants = ["--strategy", "full-shard", "no-shard", "--transport", "mpi", "shared"]
    variants += ["--precision", "fp32", "bf16"]
    _, _, *rows = printed_by(2, "step.py", *flags, *variants)
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
    _, row = by_itself("scaling.py", "--sweep", "layers", "--most", "1", "--steps", "1")
    assert row.startswith("--workload W3 --layers 4 ")
    assert len(row.split()) == 4 + 8


@needs_mpiexec
def test_losses_of_two_precisions_are_compared(tmp_path):
    (tmp_path / "text").write_text("what is read here is of no matter " * 200)
    flags = ["--workload", "W3", "--steps", "3", "--ranks", "1", "--", "--data", str(tmp_path / "text")]
    (line,) = by_itself("losses.py", *flags, "--layers", "1", "--eval-windows", "2")
    apart = float(re.search(r"at most ([\d.]+) apart", line)[1])
    held_out = [float(re.search(rf"([\d.]+) {kind}", line)[1]) for kind in ("fp32", "bf16")]
    assert apart < 0.01
    assert held_out[0] == pytest.approx(held_out[1], rel=0.005)


@pytest.mark.parametrize("more", [[], ["--lines"]])
def test_tokenizers_are_timed(more):
    pytest.importorskip("tokenizers", reason="the package tokenizers is not installed", exc_type=ImportError)
    flags = ["--megabytes", "0", "--vocabulary", "500", "--rounds", "1", *more]
    _, *rows = by_itself("encode.py", *flags)
    counts = [re.search(r", ratio +\d+\.\d\d; (\d+) and (\d+) ids$", row) for row in rows]
    assert [match and match[1] == match[2] != "0" for match in counts] == [True] * 3
