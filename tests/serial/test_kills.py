"""Complete checkpoints survive kills at random moments and signals during a save."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import run_command, run_job
from patched import train_with
from random_kills import newest, sound_step
from test_command_bits import needs_mpiexec, write_text
from test_failures import SMALL
from test_shared_fallback import MOUNT, why_no_mount

pytestmark = needs_mpiexec


@pytest.mark.timeout_seconds(400)
def test_random_kills_of_ranks_launcher_and_job_lose_nothing(tmp_path, quick):
    """If mounting is allowed, the jobs have a private /dev/shm, whose number of segments must not grow."""
    driver = Path(__file__).parent.parent / "random_kills.py"
    job = [sys.executable, driver, "--count", "5" if quick else "30", "--seed", "20", "--out", tmp_path]
    job += ["--data", *write_text(tmp_path)]
    if why_no_mount():
        command = [*job, "--shared-shm"]
    else:
        command = ["unshare", "-m", "sh", "-c", MOUNT + 'exec "$@"', "200m", *job]
    status, output, errors = run_command(command, timeout=390)
    assert status == 0, output + errors


# Script that slows each write to disk.
SLOW = """
from zero_mpi.checkpoint.parallel_write import OutputFile

write_at = OutputFile.write_at

def write_slowly(self, offset, *data):
    time.sleep(0.05 * len(data))
    write_at(self, offset, *data)

OutputFile.write_at = write_slowly
"""
SIGNALLED = "if (done, rank) == ({}, 1): os.kill(os.getpid(), signal.SIGTERM)"
Start = Callable[..., tuple[int, str, str]]


@pytest.fixture
def slow_run(tmp_path) -> Start:
    def start(signalled: int, *options: str) -> tuple[int, str, str]:
        script = train_with(tmp_path / "slow.py", SIGNALLED.format(signalled), setup=SLOW)
        flags = [*SMALL, "--data", *write_text(tmp_path), "--out", str(tmp_path / "out"), "--async-save"]
        return run_job(3, [script, *flags, "--steps", "4", *options], timeout=40, cwd=tmp_path)

    return start


@pytest.mark.parametrize("io", ["gather", "parallel"])
@pytest.mark.parametrize(("signalled", "expected", "last"), [(-1, 0, 4), (2, 75, 3)], ids=["end", "SIGTERM"])
def test_a_run_ends_when_its_last_checkpoint_is_complete(io, signalled, expected, last, slow_run, tmp_path):
    begun = time.monotonic()
    status, printed, errors = slow_run(signalled, "--checkpoint-io", io)
    assert (status, errors) == (expected, ""), printed
    assert time.monotonic() - begun > 1, "the disk was not slow"
    assert newest(tmp_path / "out") == last
    assert sound_step(tmp_path / "out" / "latest") == last
    assert f"step-{last:08d} in " in printed
    assert not list((tmp_path / "out").glob(".*"))


def test_training_goes_on_while_a_checkpoint_is_written(slow_run, tmp_path):
    """Step 4 ends before the background save of step 3 is complete."""
    status, printed, errors = slow_run(-1, "--save-every", "3", "--log-every", "1")
    assert (status, errors) == (0, ""), printed
    lines = [line.split(" in ")[0] for line in printed.splitlines()]
    order = [
        next(n for n, line in enumerate(lines) if label in line) for label in ("step 4/4", "step-00000003")
    ]
    assert order == sorted(order), printed
    assert sound_step(tmp_path / "out" / "step-00000003") == 3
