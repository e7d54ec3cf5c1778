"""A stopped or killed run continues at any number of ranks and gives the same bytes as an unbroken run."""

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import hands_sigterm_on, launcher, run_job, running, status_of, until
from patched import train_with
from test_command_bits import assert_same_run, fields, files, needs_mpiexec, train, write_text

REQUEUE = 75
SMALL = ["--layers", "1", "--dim", "24", "--heads", "3", "--kv-heads", "1", "--ffn", "17", "--context", "16"]
SMALL += ["--batch-size", "7", "--micro-batch", "2", "--warmup", "2", "--sample", "0"]
# A constant rate does not depend on --steps, so fewer --steps simulate a stop.
CONSTANT = ["--schedule", "constant"]
pytestmark = needs_mpiexec


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    return [*SMALL, "--data", *write_text(tmp_path_factory.mktemp("text"))]


@pytest.fixture(scope="module")
def unbroken(flags, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "out"
    train(1, out, *flags, *CONSTANT, "--steps", "6")
    return out


@pytest.fixture(scope="module")
def stopped_once(flags, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("stopped") / "out"
    train(4, out, *flags, *CONSTANT, "--steps", "3")
    return out


@pytest.fixture
def stopped(stopped_once, tmp_path) -> Path:
    return Path(shutil.copytree(stopped_once, tmp_path / "out", symlinks=True))


def refused(ranks: int, out: Path, *flags: str) -> str:
    command = ["-m", "zero_mpi.train", "--out", str(out), *flags]
    status, printed, errors = run_job(ranks, command, timeout=30, cwd=out.parent)
    assert (status, printed) == (2, ""), errors
    (line,) = errors.splitlines()
    return line


def test_goes_on_from_a_named_folder_into_another(stopped, flags, unbroken, tmp_path):
    """The records of the new folder begin after the resumed step."""
    folder = str(stopped / "step-00000003")
    train(2, tmp_path / "new", *flags, *CONSTANT, "--steps", "6", "--resume", folder)
    assert fields(tmp_path / "new") == fields(unbroken)[3:]
    assert files(tmp_path / "new") == files(unbroken)


def test_never_starts_over_and_empties_the_records(stopped, flags, unbroken):
    train(2, stopped, *flags, *CONSTANT, "--steps", "2", "--resume", "never")
    assert fields(stopped) == fields(unbroken)[:2]
    assert os.readlink(stopped / "latest") == "step-00000002"


ENDLESS = ["--steps", "150", "--schedule", "cosine"]  # some steps are left when the signal comes


@pytest.fixture(scope="module")
def endless(flags, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("endless") / "out"
    train(1, out, *flags, *ENDLESS)
    return out


def go_on_to_the_end(ranks: int, out: Path, flags: list[str], reference: Path) -> None:
    done = len(fields(out))
    assert 0 < done < 150
    assert os.readlink(out / "latest") == f"step-{done:08d}"
    train(ranks, out, *flags, *ENDLESS)
    assert_same_run(out, reference)


def wait_for_lines(path: Path, count: int, process: Any, seconds: float = 30) -> None:
    def has_lines() -> bool:
        return path.exists() and path.read_bytes().count(b"\n") >= count

    until(has_lines, f"{count} lines in {path.name}", seconds, process)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_the_launcher_saves_and_the_same_command_goes_on(number, flags, endless, tmp_path):
    if number == signal.SIGTERM and not hands_sigterm_on():
        pytest.skip("this launcher does not forward SIGTERM")
    out = tmp_path / "out"
    command = [*launcher(), "-n", "3", sys.executable, "-m", "zero_mpi.train"]
    command += ["--out", str(out), *flags, *ENDLESS]
    with running(command, tmp_path / "log") as process:
        wait_for_lines(out / "metrics.jsonl", 5, process)
        process.send_signal(number)
        assert process.wait(20) == REQUEUE, (tmp_path / "log").read_text()
    assert "stopped after step " in (tmp_path / "log").read_text()
    go_on_to_the_end(2, out, flags, endless)


SIGNALLED = "if (rank, done) == (1, 4): os.kill(os.getpid(), signal.SIGTERM)"


def test_a_signal_in_the_last_step_is_a_finished_run(flags, tmp_path):
    """A stop at the last step gives status 0, since a requeued job would have nothing to do."""
    script = train_with(tmp_path / "signalled.py", SIGNALLED)
    train(2, tmp_path / "out", *flags, "--steps", "5", script=script)
    assert len(fields(tmp_path / "out")) == 5


def test_the_time_limit_stops_in_time_to_save(flags, tmp_path):
    """The limit counts from the start of the process: a busy machine completes fewer steps, at least one."""
    command = ["-m", "zero_mpi.train", "--out", str(tmp_path / "out"), *flags, "--steps", "1000000"]
    status, printed, errors = run_job(2, [*command, "--max-time", "6s"], timeout=40)
    assert (status, errors) == (REQUEUE, ""), printed
    done, record = len(fields(tmp_path / "out")), status_of(tmp_path / "out")
    assert done > 0
    assert (record["state"], record["step"]) == ("stopped", done)
    assert os.readlink(tmp_path / "out" / "latest") == f"step-{done:08d}"


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("--dim 48", "embedding_length was 24, now 48"),
        ("--arch gpt2 --kv-heads 3", "arch was llama, now gpt2"),
        ("--tied", "tied was False, now True"),
        ("--seed 1", "--seed was 0, now 1"),
        ("--freeze blk.*", "--freeze was [], now ['blk.*']"),
    ],
)
def test_another_training_is_refused_by_the_first_difference(more, named, stopped, flags):
    before = (stopped / "metrics.jsonl").read_bytes()
    line = refused(2, stopped, *flags, *CONSTANT, *more.split())
    assert named in line
    assert "--resume never" in line
    assert (stopped / "metrics.jsonl").read_bytes() == before


def test_a_link_to_a_checkpoint_that_is_gone_is_no_reason_to_start_over(stopped, flags):
    """A run whose checkpoint was moved is refused, because a new start would empty its records."""
    before = (stopped / "metrics.jsonl").read_bytes()
    (stopped / "step-00000003").rename(stopped.parent / "elsewhere")
    assert "latest" in refused(2, stopped, *flags, *CONSTANT, "--steps", "6")
    assert (stopped / "metrics.jsonl").read_bytes() == before
