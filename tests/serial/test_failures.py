"""If a rank fails, exits, is killed or hangs, the job ends within seconds; failures and hangs are explained.

Small scripts add the faults to the real command. While one rank fails, other ranks wait in a collective, so
most of these jobs would hang if zero_mpi did not end them.
"""

import json
import re
import shutil
import time
from pathlib import Path

import pytest
from jobs import TIMED_OUT, launcher_kind, run_job, status_of
from patched import patched_training, train_with
from test_command_bits import assert_same_run, fields, needs_mpiexec, train, write_text
from test_stopping import told

from zero_mpi.launch import watchdog

pytestmark = needs_mpiexec
SMALL = ["--layers", "1", "--dim", "24", "--heads", "3", "--ffn", "17", "--context", "16", "--sample", "0"]
SMALL += ["--batch-size", "6", "--micro-batch", "1", "--warmup", "2", "--schedule", "constant"]
AT_ONCE = 25.0  # limit in seconds for start, failure and end of a job; a job that hangs takes LIMIT
LIMIT = 30.0

# A command run by `launch.world.run`: the ranks that `where` selects fail, other ranks wait in a barrier.
COMMAND = """
import sys
from zero_mpi.launch.world import run

def command(world, arguments):
    if {where}:
        {fault}
    world.mpi.COMM_WORLD.Barrier()
    return 0

run("trial", command, sys.argv[1:])
"""


@pytest.fixture
def flags(tmp_path) -> list[str]:
    return [*SMALL, "--data", *write_text(tmp_path), "--out", str(tmp_path / "out")]


def run_script(ranks: int, folder: Path, text: str, *flags: str) -> tuple[int, str]:
    script = folder / "script.py"
    script.write_text(text)
    start = time.monotonic()
    status, _, errors = run_job(ranks, [str(script), *flags], timeout=LIMIT, cwd=folder)
    seconds = time.monotonic() - start
    assert status != TIMED_OUT, f"the job hung\n{errors}"
    assert seconds < AT_ONCE, errors
    return status, errors


def tracebacks(errors: str) -> int:
    return errors.count("Traceback (most recent call last)")


FAULTS = {  # (ranks, where, fault, pattern of the error)
    "all ranks": (4, "True", "raise RuntimeError('the fault')", r"zero_mpi: rank \d of 4 failed"),
    "interrupt": (2, "world.rank == 1", "raise KeyboardInterrupt()", "rank 1 of 2 (failed|was interrupted)"),
    "bad input": (
        3,
        "world.rank == 1",
        "from zero_mpi.errors import UsageError; raise UsageError('the fault')",
        "rank 1.*the fault",
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_command_that_fails_ends_the_job_and_says_so_once(kind, tmp_path):
    ranks, place, fault, error = FAULTS[kind]
    status, errors = run_script(ranks, tmp_path, COMMAND.format(where=place, fault=fault))
    assert status not in (0, 75)
    assert len(re.findall(error, errors)) == 1, errors
    assert tracebacks(errors) <= 1, errors


def test_an_exception_in_the_middle_of_training_ends_the_job(flags, tmp_path):
    rank, fault = 2, 'raise RuntimeError("the fault")'
    script = patched_training(f"if (done, rank) == (2, {rank}): {fault}")
    status, errors = run_script(3, tmp_path, script, *flags, "--steps", "5")
    assert status not in (0, 2, 75)
    assert tracebacks(errors) == 1
    assert "RuntimeError: the fault" in errors
    assert f"zero_mpi: rank {rank} of 3 failed" in errors
    assert len(fields(tmp_path / "out")) == 2
    assert told(tmp_path / "out") == ("failed", f"rank {rank}: RuntimeError: the fault")
    events = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    assert [(event["event"], event["step"]) for event in events] == [("started", 0), ("failed", 2)]
    assert events[-1]["reason"] == f"rank {rank}: RuntimeError: the fault"


def test_an_exception_after_a_long_wait_of_the_others_leaves_no_roll_call(flags, tmp_path):
    fault = 'time.sleep(2); raise RuntimeError("the fault")'
    setup = "from zero_mpi.launch import watchdog; watchdog.CALL = 0.5"
    script = patched_training(f"if (done, rank) == (2, 1): {fault}", setup=setup)
    status, errors = run_script(3, tmp_path, script, *flags, "--steps", "5")
    assert (status, tracebacks(errors)) == (1, 1)
    assert [path.name for path in (tmp_path / "out").glob(".ranks*")] == []


@pytest.mark.parametrize("fault", ["sys.exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_rank_that_leaves_in_the_middle_of_training_ends_the_job(fault, flags, tmp_path):
    script = patched_training(f"if (done, rank) == (2, 1): {fault}")
    status, _ = run_script(3, tmp_path, script, *flags, "--steps", "5")
    assert status not in (0, 2, 75)


def test_a_run_goes_on_after_a_rank_was_killed(flags, tmp_path):
    """The resumed run equals an unbroken run; records after the checkpoint are replaced."""
    train(1, tmp_path / "whole", *flags[:-2], "--steps", "6")
    script = patched_training("if (done, rank) == (5, 2): os.kill(os.getpid(), signal.SIGKILL)")
    status, _ = run_script(4, tmp_path, script, *flags, "--steps", "6", "--save-every", "3")
    assert status != 0
    assert len(fields(tmp_path / "out")) == 5
    assert told(tmp_path / "out") == ("running", ""), "no rank was left to update the state"
    printed = train(3, tmp_path / "out", *flags[:-2], "--steps", "6")
    assert "at step 3" in printed
    assert_same_run(tmp_path / "out", tmp_path / "whole")


# One rank stops, hangs or enters another collective while the other ranks enter the collectives of step 3.
HANGING = """
import os, signal, time
import numpy as np
from zero_mpi.train import command as train_command, trainer as train

rounds = train.Trainer.rounds

def stop(self):
    os.kill(os.getpid(), signal.SIGSTOP)

def read_for_ever(self):
    self.session.loader.micro = lambda step, i: time.sleep(1000)

def meet_alone(self):
    self.session.comm.barrier()

def standing_rounds(self, number):
    if number == 2:
        self.watchdog.limit = {limit}  # the start of a job may take longer on a busy machine
        if self.world.rank == {rank}:
            {fault}(self)
    rounds(self, number)

train.Trainer.rounds = standing_rounds
train_command.main()
"""
TIMEOUT = 1.5


def hang(ranks: int, folder: Path, rank: int, fault: str, *flags: str, limit: str = str(TIMEOUT)) -> str:
    script = folder / "hanging.py"
    script.write_text(HANGING.format(rank=rank, fault=fault, limit=limit))
    settings = ["--steps", "5", "--save-every", "1", "--timeout", "2.5"]
    status, _, errors = run_job(ranks, [str(script), *flags, *settings], timeout=60, cwd=folder)
    end = time.time()
    assert status == watchdog.STATUS, f"status {status}\n{errors}"
    assert errors.count("ending the job") == 1, errors
    assert end - (folder / "out" / "status.json").stat().st_mtime < AT_ONCE
    return errors


def assert_told(errors: str, out: Path, reason: str, limit: float = TIMEOUT) -> None:
    """Check that the reason is printed and recorded, and that no file of the watchdog is left."""
    match = re.search(r"zero_mpi: no progress for (.+) s: (.+); ending the job", errors)
    assert match, errors
    assert limit <= float(match[1]) < limit + 2
    assert reason in match[2]
    status = status_of(out)
    assert (status["state"], status["step"]) == ("failed", 2)
    assert status["reason"] == f"no progress for {match[1]} s: {match[2]}"
    assert [path.name for path in out.glob(".*")] in ([], [".lock"])  # a killed job leaves its lock


def forget_who_was_woken(out: Path, rank: int) -> None:
    if launcher_kind() == "openmpi" and (out / ".ranks").exists():
        assert [path.name.rpartition("-")[2] for path in (out / ".ranks").iterdir()] == [f"{rank:05d}"]
        shutil.rmtree(out / ".ranks")


@pytest.mark.parametrize(("transport", "ranks", "rank"), [("mpi", 3, 0), ("shared", 4, 3)])
def test_a_rank_that_is_stopped_is_named_by_the_others(transport, ranks, rank, flags, tmp_path):
    errors = hang(ranks, tmp_path, rank, "stop", *flags, "--transport", transport)
    forget_who_was_woken(tmp_path / "out", rank)
    assert_told(errors, tmp_path / "out", f"no sign of life from rank {rank}")
    assert re.search(rf"zero_mpi: no sign of life from rank {rank} \(process \d+ on \S+\): ", errors)
    others = re.findall(r"zero_mpi: (ranks? .+): step 3, waiting in (.+), for", errors)
    assert others, errors
    assert not any(re.match(rf"ranks? (.*\b)?{rank}\b", label) for label, _ in others)
    assert "wait" in errors[errors.index("stacks of rank") :]
    assert "at step 2" in train(2, tmp_path / "out", *flags[:-2], "--steps", "3")
    if transport == "mpi":
        train(1, tmp_path / "whole", *flags[:-2], "--steps", "3")
        assert_same_run(tmp_path / "out", tmp_path / "whole")


def test_a_rank_that_reads_for_ever_is_named_with_its_stack(flags, tmp_path):
    """A rank that loads data is in no collective; its stack is printed first."""
    rank, limit = 1, "self.session.config.timeout"
    errors = hang(2, tmp_path, rank, "read_for_ever", *flags, "--transport", "mpi", limit=limit)
    assert_told(errors, tmp_path / "out", "step 3, in no collective", 2.5)
    assert re.search(rf"zero_mpi: rank {rank} \(process \d+ on \S+\): step 3, in no collective", errors)
    assert re.search(r"zero_mpi: ranks? .+: step 3, waiting in \w+ of (gradients|parameters|updated)", errors)
    first = errors.split("stacks of ")[1]
    assert first.startswith(f"rank {rank}:")
    assert "<lambda>" in first


@pytest.mark.parametrize("transport", ["mpi", "shared"])
def test_a_rank_in_another_collective_is_named_long_before_the_limit(transport, flags, tmp_path):
    script = HANGING.format(rank=1, fault="meet_alone", limit=600)
    status, errors = run_script(3, tmp_path, script, *flags, "--steps", "5", "--transport", transport)
    assert status == 1, errors
    assert errors.count("ending the job") == 1
    assert re.search(r"number \d+ \(from 0\) is barrier on rank 1 and \w+ of .* on ranks? [02]", errors)
    assert re.search(r"zero_mpi: rank 1 \(process \d+ on \S+\): step 3, waiting in barrier, for", errors)
    assert re.search(r"zero_mpi: rank.* [02]\b.*: step 3, waiting in \w+ of (gradients|parameters) ", errors)
    assert "meet_alone" in errors.partition("stacks of rank 1")[2]
    state, reason = told(tmp_path / "out")
    assert (state, reason in errors) == ("failed", True)
    assert [path.name for path in (tmp_path / "out").glob(".*")] in ([], [".lock"])


@pytest.mark.parametrize("transport", ["mpi", "shared"])
def test_checked_collectives_name_the_first_difference(transport, flags, tmp_path):
    """Different collectives are reported in one line, without waiting for the limit."""
    script = HANGING.format(rank=1, fault="meet_alone", limit=60)
    checks = ["--check-collectives", "--transport", transport]
    status, errors = run_script(3, tmp_path, script, *flags, "--steps", "5", *checks)
    assert status == 1, errors
    assert tracebacks(errors) == 0, errors
    assert len(re.findall("^zero_mpi", errors, re.MULTILINE)) == 1, errors
    assert errors.startswith("zero_mpi train: error: ")
    assert "is barrier on rank 1, where 2 of 3 ranks start" in errors
    state, reason = told(tmp_path / "out")
    assert state == "failed"
    assert reason in errors


def test_without_files_each_rank_speaks_for_itself(flags, tmp_path):
    """The job also ends if no file can be written, for example on a hanging file system."""
    obstacle = f"open({str(tmp_path / 'out' / '.ranks')!r}, 'w').close()"
    setup = "from zero_mpi.launch import watchdog; watchdog.GRACE = self.watchdog.limit = 0.5"
    script = patched_training(f"if done == 2: {obstacle}; {setup}; time.sleep(99)")
    status, errors = run_script(2, tmp_path, script, *flags, "--steps", "5")
    assert status == watchdog.STATUS
    assert re.search(r"zero_mpi: rank \d: no progress for .+ s: step 2, in no collective.*; ending", errors)
    assert "Thread 0x" in errors


def test_a_job_that_is_suspended_as_a_whole_goes_on(flags, tmp_path):
    """A batch system may suspend a job and continue it later; this is not a hang."""
    suspend = "kill -STOP {pids}; sleep 5; kill -CONT {pids}"
    fault = (
        "import subprocess; pids = ' '.join(map(str, self.session.comm.allgather_object(os.getpid()))); "
        f"rank == 0 and subprocess.Popen({suspend!r}.format(pids=pids), shell=True); "
        "self.watchdog.limit = 3.0; [time.sleep(0.1) for _ in range(10)]"
    )
    script = train_with(tmp_path / "suspended.py", f"if done == 2: {fault}")
    train(2, tmp_path / "out", *flags[:-2], "--steps", "5", script=script)
    assert len(fields(tmp_path / "out")) == 5


def test_the_watchdog_lets_a_slow_run_be(flags, tmp_path):
    """Each step is shorter than the limit; all steps together are longer."""
    script = train_with(tmp_path / "slow.py", "time.sleep(1)")
    train(2, tmp_path / "out", *flags[:-2], "--steps", "5", "--timeout", "4", script=script)
    assert len(fields(tmp_path / "out")) == 5
