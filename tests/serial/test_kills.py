"""The real job, killed again and again: each time it ends at once, and the same command goes on.

A random rank is killed by SIGKILL at a random moment of a step or of a save, some forty times (a dozen with
--quick) over one run in one folder. What was complete before a kill is sound after it, and at the end the run
that was never given a chance has the bytes of one that nothing disturbed.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import RANK_VARIABLES, clean_environment, end, launcher, run_command, run_job
from test_command_bits import assert_same_run, needs_mpiexec, train, write_text
from test_shared_fallback import MOUNT, why_no_mount

from zero_mpi.checkpoint import folders
from zero_mpi.checkpoint.sound import check_digests, open_checkpoint

pytestmark = needs_mpiexec
# Saving takes most of a step here: 180 000 parameters, and two rounds of micro-batches.
MODEL = ["--layers", "2", "--dim", "96", "--heads", "3", "--ffn", "97", "--context", "32", "--warmup", "2"]
MODEL += ["--batch-size", "12", "--micro-batch", "2", "--sample", "0", "--schedule", "constant"]
SETTINGS = [  # (ranks, flags) of the trials, in turn
    (3, []),
    (3, ["--async-save"]),
    (2, ["--checkpoint-io", "parallel"]),
    (3, ["--async-save", "--checkpoint-io", "parallel"]),
    (2, ["--async-save"]),
    (3, ["--checkpoint-io", "parallel", "--strategy", "no-shard"]),
]
TRIALS, QUICK_TRIALS = 42, 8
AT_ONCE = 10.0  # seconds in which a job whose rank was killed must end
PATIENCE = 40.0  # seconds for a job on a busy machine to start, go on and save twice


def descendants(root: int) -> list[int]:
    """The processes below one, by the parents in /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue  # it has ended since
            children.setdefault(parent, []).append(int(entry.name))
    found, waiting = [], [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def ranks_of(job: subprocess.Popen[bytes]) -> dict[int, int]:
    ranks = {}
    for process in descendants(job.pid):
        try:
            lines = Path(f"/proc/{process}/environ").read_bytes().decode().split("\0")
        except OSError:
            continue
        told = dict(line.partition("=")[::2] for line in lines)
        rank = next((told[name] for name in RANK_VARIABLES if name in told), None)
        if rank is not None:
            ranks[int(rank)] = process
    return ranks


def newest(out: Path) -> int:
    """The step that `latest` names; 0 where there is none yet."""
    try:
        return int(os.readlink(out / "latest").removeprefix("step-"))
    except FileNotFoundError:
        return 0


def wait_for_next(out: Path, job: subprocess.Popen[bytes], log: Path) -> float:
    """Return when `latest` names another checkpoint than now. The seconds that took."""
    begun, before = time.monotonic(), newest(out)
    while newest(out) == before:
        assert job.poll() is None, f"the job ended by itself:\n{log.read_text()}"
        assert time.monotonic() - begun < PATIENCE, f"no new checkpoint:\n{log.read_text()}"
        time.sleep(0.001)
    return time.monotonic() - begun


def sound_step(folder: Path) -> int:
    """The step of a checkpoint whose two files are what was written."""
    files = open_checkpoint(folder)
    state = files.state
    check_digests(files)
    return int(state.metadata["training.iteration_count"])


class Trials:
    """One run, started and killed many times by the same command in the same folder."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        self.out, self.log, self.flags = folder / "out", folder / "log", flags
        self.draw = random.Random(20)
        self.while_saving = self.killed_root = 0

    def trial(self, ranks: int, more: list[str]) -> None:
        """Start the command, kill one rank at a random moment after a save, and look at what is there."""
        before = newest(self.out)
        command = [*launcher(), "-n", str(ranks), sys.executable, "-m", "zero_mpi.train"]
        command += ["--out", str(self.out), *self.flags, *more, "--steps", "100000", "--save-every", "1"]
        with self.log.open("wb") as log:
            job = subprocess.Popen(
                command, env=clean_environment(), stdout=log, stderr=log, start_new_session=True
            )
            try:
                wait_for_next(self.out, job, self.log)
                period = wait_for_next(self.out, job, self.log)
                time.sleep(self.draw.random() * 2 * period)
                complete = self.kill(job, ranks)
            finally:
                end(job)
        self.check(before, complete)

    def kill(self, job: subprocess.Popen[bytes], ranks: int) -> int:
        """Kill one rank; the job must end at once and leave nobody behind. The newest step before that."""
        running = ranks_of(job)
        assert sorted(running) == list(range(ranks))
        complete, victim = newest(self.out), self.draw.randrange(ranks)
        os.kill(running[victim], signal.SIGKILL)
        begun = time.monotonic()
        try:
            status = job.wait(AT_ONCE)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the job went on for {AT_ONCE} s without rank {victim}:\n{self.log.read_text()}")
        assert status not in (0, 2, 75)
        while left := [rank for rank, process in running.items() if Path(f"/proc/{process}").exists()]:
            assert time.monotonic() - begun < AT_ONCE, f"ranks {left} are still there"
            time.sleep(0.01)
        self.killed_root += victim == 0
        return complete

    def check(self, before: int, complete: int) -> None:
        """What was complete is sound, and the command went on from where the last one was."""
        self.while_saving += bool(list(self.out.glob(".step-*.partial")))
        best = folders.candidates(self.out)[0]
        assert sound_step(best) >= complete > before
        assert [sound_step(folder) for _, folder in folders.steps(self.out)] == [
            step for step, _ in folders.steps(self.out)
        ]
        said = self.log.read_text()
        assert "passed over" not in said
        if before:
            assert "resuming from" in said
            assert int(said.partition(" at step ")[2].split()[0]) >= before


@pytest.mark.timeout_seconds(400)
def test_a_run_that_is_killed_again_and_again_loses_nothing(tmp_path, quick):
    flags = [*MODEL, "--data", *write_text(tmp_path), "--keep", "2"]
    trials = Trials(tmp_path, flags)
    number = QUICK_TRIALS if quick else TRIALS
    for trial in range(number):
        trials.trial(*SETTINGS[trial % len(SETTINGS)])
    assert quick or 0 < trials.while_saving < number, "kills must fall into saves and between them"
    assert 0 < trials.killed_root < number
    last = str(newest(trials.out) + 3)
    train(3, trials.out, *flags, "--steps", last)
    train(1, tmp_path / "unbroken", *flags, "--steps", last)
    assert_same_run(trials.out, tmp_path / "unbroken")
    assert not list(trials.out.glob(".*"))


@pytest.mark.timeout_seconds(400)
def test_random_kills_of_ranks_launcher_and_job_lose_nothing(tmp_path, quick):
    """In a /dev/shm of its own, which holds no more at the end; by hand `random_kills.py` does a hundred."""
    if reason := why_no_mount():
        pytest.skip(f"no private /dev/shm: {reason}")
    driver = Path(__file__).parent.parent / "random_kills.py"
    job = [
        sys.executable,
        str(driver),
        "--count",
        "4" if quick else "10",
        "--seed",
        "20",
        "--out",
        str(tmp_path),
    ]
    command = [
        "unshare",
        "-m",
        "sh",
        "-c",
        MOUNT + 'exec "$@"',
        "200m",
        *job,
        "--data",
        *write_text(tmp_path),
    ]
    status, said, errors = run_command(command, timeout=390)
    assert status == 0, said + errors


# a run that ends waits for the save under way

# Runs `zero_mpi.train` on a disk that takes a while for each write, and signals itself before a step.
SLOW = """
import os, signal, time
from zero_mpi.train import command as train_command, trainer as train
from zero_mpi.checkpoint.output_file import OutputFile

write_at = OutputFile.write_at

def write_slowly(self, offset, *data):
    time.sleep(0.05 * len(data))
    write_at(self, offset, *data)

OutputFile.write_at = write_slowly

step = train.Trainer.step

def signalled_step(self):
    if (self.world.rank, self.progress.step) == (1, {signalled}):
        os.kill(os.getpid(), signal.SIGTERM)
    return step(self)

train.Trainer.step = signalled_step
train_command.main()
"""
SMALL = ["--layers", "1", "--dim", "24", "--heads", "3", "--ffn", "17", "--context", "16", "--sample", "0"]
SMALL += ["--batch-size", "6", "--micro-batch", "1", "--warmup", "2", "--schedule", "constant"]
Start = Callable[..., tuple[int, str, str]]


@pytest.fixture
def slow_run(tmp_path) -> Start:
    """Runs the command on a slow disk, with a save in the background after the last step."""

    def start(signalled: int, *more: str) -> tuple[int, str, str]:
        script = tmp_path / "slow.py"
        script.write_text(SLOW.format(signalled=signalled))
        flags = [*SMALL, "--data", *write_text(tmp_path), "--out", str(tmp_path / "out"), "--async-save"]
        return run_job(3, [str(script), *flags, "--steps", "4", *more], timeout=40, cwd=tmp_path)

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
    """Step 4 is done before the checkpoint of step 3 is."""
    status, printed, errors = slow_run(-1, "--save-every", "3", "--log-every", "1")
    assert (status, errors) == (0, ""), printed
    lines = [line.split(" in ")[0] for line in printed.splitlines()]
    order = [
        next(n for n, line in enumerate(lines) if what in line) for what in ("step 4/4", "step-00000003")
    ]
    assert order == sorted(order), printed
    assert sound_step(tmp_path / "out" / "step-00000003") == 3
