"""Two jobs share a run folder: the first completes, and the second names the first."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import clean_environment, launcher, run_job, status_of, until
from patched import train_with
from test_command_bits import fields, needs_mpiexec, train, write_text

pytestmark = needs_mpiexec
SMALL = ["--layers", "1", "--dim", "24", "--heads", "3", "--ffn", "17", "--context", "16", "--sample", "0"]
SMALL += ["--batch-size", "6", "--micro-batch", "1", "--warmup", "2", "--schedule", "constant"]
SMALL += ["--steps", "8", "--eval-every", "0", "--save-every", "2", "--keep", "0"]
# Rank 0 waits after step 3 until the file `go` exists.
WAITING = """
if (rank, done) == (0, 3):
    open("waits", "w").close()
    while not os.path.exists("go"):
        time.sleep(0.02)
"""


@pytest.fixture
def job(tmp_path) -> list[str]:
    setup = "from zero_mpi.launch import folder_lock; folder_lock.EVERY = 0.2"
    return [
        train_with(tmp_path / "job.py", WAITING, setup=setup),
        *SMALL,
        "--data",
        *write_text(tmp_path),
        "--out",
        str(tmp_path / "out"),
    ]


@pytest.fixture
def first(job, tmp_path) -> Iterator[subprocess.Popen[bytes]]:
    command = [*launcher(), "-n", "2", sys.executable, *job]
    process = subprocess.Popen(command, cwd=tmp_path, env=clean_environment(), start_new_session=True)
    until((tmp_path / "waits").exists, "step 3")
    yield process
    (tmp_path / "go").touch()
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def snapshot(out: Path) -> dict[str, object]:
    """Return the content of every file, except files that the first job renews while it waits."""
    files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != ".lock"}
    files = {
        path: each for path, each in files.items() if path.match(".ranks/file") or not path.match(".ranks/*")
    }
    record = json.loads(files.pop(out / "status.json"))
    return files | {
        "status": record | {"updated": "", "step": 0},
        "folders": sorted(p for p in out.rglob("*") if p.is_dir()),
    }


LOOKING = r"(\S+ was left by process .*: waiting \d+ s for a sign of life\n)?"


def assert_refused(done: tuple[int, str, str], out: Path, pid: object) -> None:
    """Check for status 2 and one line that names the holder, its start and its lock."""
    status, printed, errors = done
    assert status == 2, errors
    assert re.fullmatch(LOOKING, printed), printed  # without locks the job waits for a renewal of the lock
    (line,) = errors.splitlines()
    assert line.startswith(f"zero_mpi train: error: --out {out}: ")
    assert f"process {pid} on " in line
    assert re.search(r", since \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ; ", line)
    assert f"{out}/.lock" in line


def test_the_second_job_is_refused_and_touches_nothing(first, job, tmp_path):
    out = tmp_path / "out"
    for name in (".step-00000004.partial", ".ranks"):  # a new job would remove these files
        (out / name).mkdir()
        (out / name / "file").write_text("of the first")
    before, pid = snapshot(out), status_of(out)["pid"]
    for extra in ([], ["--resume", "never"]):
        assert_refused(run_job(3, [*job, *extra], timeout=30, cwd=tmp_path), out, pid)
    assert snapshot(out) == before
    status, _, errors = run_job(1, [*job, "--dry-run"], timeout=30, cwd=tmp_path)
    assert (status, errors) == (0, ""), "a dry run needs no lock"
    (tmp_path / "go").touch()
    assert first.wait(30) == 0
    assert [step for step, *_ in fields(out)] == [str(step) for step in range(1, 9)]
    assert (status_of(out)["state"], status_of(out)["pid"]) == ("done", pid)


def test_after_a_kill_the_next_job_starts_at_once(first, job, tmp_path):
    out = tmp_path / "out"
    os.kill(int(status_of(out)["pid"]), signal.SIGKILL)
    (tmp_path / "go").touch()
    printed = train(2, out, *job[1:])
    assert "waiting" not in printed
    assert "resuming from" in printed
    assert [step for step, *_ in fields(out)] == [str(step) for step in range(1, 9)]
    assert not list(out.glob(".*"))


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_job_whose_folder_goes_in_a_long_step_does_not_wait_for_its_end(is_replaced, first, tmp_path):
    """The job ends although rank 0 is in a step that would last until the end of the test."""
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    if is_replaced:
        (tmp_path / "out").mkdir()
    assert first.wait(60) == 1
    assert os.listdir(tmp_path / "out") == [] if is_replaced else not (tmp_path / "out").exists()
    assert status_of(tmp_path / "elsewhere")["state"] == "running"
