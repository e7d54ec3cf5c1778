"""`status.json` has the state of a run: running, done, stopped or failed."""

import time
from datetime import UTC, datetime, timedelta

import pytest
from jobs import run_job, status_of, until
from test_command_bits import SIZES, needs_mpiexec, write_text

from zero_mpi import __version__
from zero_mpi.telemetry import status
from zero_mpi.telemetry.status import DONE, FAILED, RUNNING, Status

FIELDS = ["state", "reason", "step", "steps", "ranks", "host", "pid", "started", "updated", "version"]


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(status, "RENEWAL_SECONDS", 0.05)


def test_a_run_is_running_and_renewed_then_done(tmp_path, often):
    writer, before = Status(tmp_path, 0, 4, 20), datetime.now(UTC) - timedelta(seconds=1)
    writer.begin()
    record = status_of(tmp_path)
    assert list(record) == FIELDS
    assert before < datetime.fromisoformat(record["started"])
    assert (record["state"], record["step"], record["steps"], record["ranks"]) == (RUNNING, 0, 20, 4)
    assert record["version"] == __version__
    writer.at(7)
    until(lambda: status_of(tmp_path)["step"] == 7, "step 7")
    until(lambda: status_of(tmp_path)["updated"] > record["updated"], "another time")
    writer.end(DONE)
    time.sleep(0.2)  # an update after the end would say "running"
    assert status_of(tmp_path)["state"] == DONE
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_another_rank_that_ends_the_job_has_the_last_word(tmp_path, often):
    root, other = Status(tmp_path, 0, 2, 5), Status(tmp_path, 1, 2, 5)
    root.begin()
    other.at(3)
    before = status_of(tmp_path)
    other.end(FAILED, "rank 1: RuntimeError: the fault")
    time.sleep(0.3)  # rank 0 lives a little longer and must not report success
    entry = status_of(tmp_path)
    assert (entry["state"], entry["reason"], entry["step"]) == (FAILED, "rank 1: RuntimeError: the fault", 3)
    assert {key: entry[key] for key in ("pid", "host", "started")}.items() <= before.items()
    root.end(FAILED, "rank 0 was ended")
    assert status_of(tmp_path)["reason"] == "rank 1: RuntimeError: the fault", "the first reason must stay"


def test_where_no_new_file_has_room_the_old_one_is_written_over(tmp_path, monkeypatch):
    writer = Status(tmp_path, 0, 1, 5)
    writer.begin()

    def no_room(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", no_room)
    writer.end(FAILED, "No space left on device")
    assert status_of(tmp_path)["reason"] == "No space left on device"
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


FLAGS = [*SIZES, "--steps", "3", "--sample", "0", "--batch-size", "4", "--eval-every", "0", "--warmup", "2"]


@needs_mpiexec
def test_a_job_that_is_refused_says_so(tmp_path):
    flags = [*FLAGS, "--data", "nothing", "--out", "out"]
    status, _, errors = run_job(2, ["-m", "zero_mpi.train", *flags], cwd=tmp_path)
    assert status == 2, errors
    record = status_of(tmp_path / "out")
    assert (record["state"], record["step"]) == (FAILED, 0)
    assert record["reason"] in errors


def test_a_run_that_is_not_begun_leaves_the_word_of_the_one_before(tmp_path):
    before = Status(tmp_path, 0, 2, 5)
    before.begin()
    before.end(DONE)
    text = (tmp_path / "status.json").read_text()
    now = Status(tmp_path, 0, 2, 5)
    now.begin()
    assert status_of(tmp_path)["state"] == RUNNING
    now.refused("another corpus")
    assert (tmp_path / "status.json").read_text() == text


# Rank 1 is killed after its last step, before the end of the job.
LOST = """
import os, signal
from zero_mpi.launch import world as launch
from zero_mpi.train import command as train_command

meet = launch.meet

def lost(world, patience):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return meet(world, patience)

launch.meet = lost
train_command.main()
"""


@needs_mpiexec
def test_a_job_is_not_done_before_all_ranks_have_come_to_the_end(tmp_path):
    script = tmp_path / "lost.py"
    script.write_text(LOST)
    flags = [*FLAGS, "--data", *write_text(tmp_path), "--out", str(tmp_path / "out")]
    code, _, _ = run_job(2, [str(script), *flags])
    assert code != 0
    assert status_of(tmp_path / "out")["state"] == RUNNING
