"""The benchmarks run and print their tables; how fast they are is not for a test to say."""

import re
from pathlib import Path

import pytest
from jobs import run_job
from test_command_bits import needs_mpiexec

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "checkpoint.py"
ROW = re.compile(
    r"(?P<name>\S.*?)  +(?P<speed>\d+\.\d+) +(?P<ratio>\d+\.\d+) +\d+\.\d+\.\.\d+\.\d+ +\d+\.\d+"
)
ROWS = [
    "plain write and fsync",
    "save, gather",
    "save, parallel",
    "save, async: held up",
    "save, async: complete",
    "plain read, page cache",
    "load, page cache",
    "plain read, cache dropped",
    "load, cache dropped",
]


@needs_mpiexec
@pytest.mark.parametrize(("ranks", "more"), [(1, []), (2, ["--warm-memory"])])
def test_checkpoint_prints_its_table_and_leaves_nothing_behind(ranks, more, tmp_path):
    flags = ["--mb", "0.5", "--repeats", "2", "--folder", tmp_path, *more]
    status, printed, errors = run_job(ranks, [SCRIPT, *flags], timeout=60)
    assert (status, errors) == (0, ""), printed
    first, _, *rows, disk, index = printed.splitlines()
    assert re.match(rf"\d+ MB of state .*, {ranks} ranks?, 2 repeats, on \S+$", first)
    found = [ROW.fullmatch(row) for row in rows]
    assert [match and match["name"] for match in found] == ROWS
    assert all(float(match["speed"]) > 0 for match in found)
    assert [match["ratio"] for match in found if match["name"].startswith("plain")] == ["1.00"] * 3
    assert re.match(r"of the last load, \d+% came from the disk$", disk)
    assert re.match(r"index of SmolLM2-135M: (\d\.\d+ s|not measured)", index)
    assert list(tmp_path.iterdir()) == []


@needs_mpiexec
@pytest.mark.parametrize("flags", [["--mb", "0"], ["--repeats", "0"], ["--folder", "nowhere"], ["--mb", "x"]])
def test_bad_flags_are_one_line(flags, tmp_path):
    status, printed, errors = run_job(2, [SCRIPT, *flags], timeout=30, cwd=tmp_path)
    assert (status, printed, len(errors.splitlines())) == (2, "", 1)
