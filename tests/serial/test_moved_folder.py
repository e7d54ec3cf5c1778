"""A run whose folder is moved, removed or replaced ends with status 1 and makes no other folder.

The folder moves at random moments: during the start, steps, a save and a background save, 40 times in all (3
times with --quick). `pytest -s` prints how long the jobs took to end.
"""

import os
import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from jobs import clean_environment, end, launcher, ranks_said, run_job, until, warm_python
from patched import train_with
from random_kills import MODEL, ranks_of
from test_command_bits import needs_mpiexec, write_text

TRIALS, QUICK_TRIALS = 40, 3
PATIENCE = 60.0  # seconds for a job on a busy machine to start, or to end
SAVES = [  # flags: no saves; a save per step; in the background; by all ranks
    ["--save-every", "0"],
    ["--save-every", "1"],
    ["--save-every", "1", "--async-save"],
    ["--save-every", "2", "--async-save", "--checkpoint-io", "parallel"],
]


def move(out: Path) -> None:
    out.rename(out.with_name("elsewhere"))


def move_parent(out: Path) -> None:
    out.parent.rename(out.parent.with_name(f"{out.parent.name}-elsewhere"))


def replace(out: Path) -> None:
    out.rename(out.with_name("elsewhere"))
    out.mkdir()


def remove(out: Path) -> None:
    while out.exists():  # the run may add to a folder that is being removed
        shutil.rmtree(out, ignore_errors=True)


WAYS = [move, remove, replace, move_parent, remove]


def lines_of(errors: str) -> list[str]:
    return [line for line in errors.splitlines() if not line.startswith("Abort(")]


def seconds_to_end(command: list[str], out: Path, sign: str, delay: float, way, cwd: Path) -> float:
    environ = clean_environment()
    with (cwd / "errors").open("wb") as errors:
        job = subprocess.Popen(
            [*launcher(), "-n", "3", *warm_python(environ), *command, "--out", str(out)],
            env=environ, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True,
        )  # fmt: skip
        try:
            until(lambda: (out / sign).exists() and (out / sign).stat().st_size, sign, PATIENCE, job)
            time.sleep(delay)
            running = ranks_of(job)
            way(out)
            begun = time.monotonic()
            status = job.wait(PATIENCE)
            seconds = time.monotonic() - begun
        finally:
            end(job)
    text = ranks_said((cwd / "errors").read_text())
    assert status == 1, text
    assert [str(out) in line for line in lines_of(text)] == [True], text
    until(lambda: not any(Path(f"/proc/{process}").exists() for process in running.values()), "ends of ranks")
    if way is replace:
        assert os.listdir(out) == []
        out.rmdir()
    assert not out.exists()
    assert way is move_parent or list(out.parent.glob("*")) in ([], [out.with_name("elsewhere")])
    return seconds


@needs_mpiexec
@pytest.mark.timeout_seconds(900)
def test_a_run_ends_wherever_its_folder_is_lost(tmp_path, quick):
    draw, ends, texts = random.Random(10), list[float](), write_text(tmp_path)
    for number in range(QUICK_TRIALS if quick else TRIALS):
        out = tmp_path / f"{number}" / "out"
        sign, longest = draw.choice([(".lock", 2.0), ("metrics.jsonl", 0.5), ("metrics.jsonl", 0.05)])
        command = ["-m", "zero_mpi.train", *MODEL, "--data", *texts, "--steps", "100000", "--keep", "2"]
        command += SAVES[number % len(SAVES)]
        delay, way = draw.random() * longest, WAYS[number % len(WAYS)]
        ends.append(seconds_to_end(command, out, sign, delay, way, tmp_path))
        print(f"{number:2} {way.__name__:11} {delay:.3f} s after {sign:13} {ends[-1]:5.2f} s", flush=True)
    print(f"{len(ends)} runs, the longest end {max(ends):.2f} s")


@needs_mpiexec
def test_tokenize_ends_as_well(tmp_path):
    command = ["-m", "zero_mpi", "tokenize", "--tokenizer", "byte", "--part-mb", "0.03"]
    seconds_to_end(command, tmp_path / "run" / "out", ".tokenize/00003.json", 0.0, move, tmp_path)


# Moves the run folder after step 2, while a background save is blocked in its first write. The save
# continues after the run has failed, and the process takes a while to end.
SLOW_WRITES = """
import threading
from zero_mpi.checkpoint.parallel_write import OutputFile
from zero_mpi.launch import folder_lock as hold, stopping

hold.EVERY = 0.05
write_at, writing = OutputFile.write_at, threading.Event()

def write_slowly(self, offset, *data):
    if not writing.is_set():
        writing.set()
        time.sleep(2.0)
    write_at(self, offset, *data)

leave, stopping.leave = stopping.leave, lambda status: (time.sleep(3), leave(status))
OutputFile.write_at = write_slowly
"""
MOVES = """
if (rank, done) == (0, 2):
    writing.wait()
    os.rename("out", "elsewhere")
    while not self.world.comm.folder_problem():
        time.sleep(0.01)
"""


@needs_mpiexec
def test_a_run_that_ends_waits_for_the_save_behind_it(tmp_path):
    """The saving thread is inside the MPI library, which must not end before the thread does."""
    script = train_with(tmp_path / "slow.py", MOVES, setup=SLOW_WRITES)
    flags = [*MODEL, "--data", *write_text(tmp_path), "--out", "out", "--steps", "9", "--async-save"]
    status, _, errors = run_job(3, [script, *flags, "--save-every", "2"], cwd=tmp_path)
    assert (status, len(lines_of(errors))) == (1, 1), errors
    assert not (tmp_path / "out").exists()
