"""A run folder has one holder while processes acquire it, release it, die, stop and fork.

The processes read commands from pipes. `locks` is a file system with locks, `none` one without, and `apart`
has locks that other machines do not see. In `none` and `apart` each process acts as a separate machine.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jobs import clean_environment, until

from zero_mpi.launch.folder_lock import SIZE, unpacked

PATIENCE = 2.0
CHILD = f"""
import os, subprocess, sys, time
from pathlib import Path
from zero_mpi.launch import folder_lock as lock
from zero_mpi.errors import UsageError

kind, name = sys.argv[1:]
lock.EVERY, lock.POLL, lock.PATIENCE, lock.SETTLE = 0.05, 0.01, {PATIENCE}, 1.0
if kind != "locks":
    lock.lock = {{"none": lambda handle: None, "apart": lambda handle: True}}[kind]
    lock.BOOT, lock.platform.node = Path("/nowhere"), lambda: name
for line in sys.stdin:
    word, *more = line.split()
    answer = "done"
    if word == "take":
        time.sleep(float(more[1]))
        try:
            held = lock.RunLock.take(Path(more[0]), f"Slurm job {{name}}")
            answer = "took"
        except UsageError as error:
            answer = str(error)
    elif word == "drop":
        held.release()
    elif word == "exec":
        answer = subprocess.Popen(["sleep", "60"], close_fds=False, stdout=subprocess.DEVNULL).pid
    elif word == "lost":
        while not held.problem:
            time.sleep(0.02)
        answer = held.problem
    print(answer, flush=True)
"""


class Child:
    def __init__(self, kind: str, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", CHILD, kind, name or f"{id(self)}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean_environment(),
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, *words: object) -> None:
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        return self.process.stdout.readline().strip()

    def ask(self, *words: object) -> str:
        self.tell(*words)
        return self.answer()

    def kill(self) -> None:
        """Kill the process without waiting for its output, which its children may hold open."""
        self.process.kill()
        self.process.wait()


@pytest.fixture
def children() -> Iterator[Callable[[str, int], list[Child]]]:
    processes: list[Child] = []

    def start(kind: str, count: int, name: str = "") -> list[Child]:
        new = [Child(kind, name) for number in range(count)]
        processes.extend(new)
        return new

    yield start
    for child in processes:
        child.kill()
        child.process.stdin.close()
        child.process.stdout.close()


def winner_of(folder: Path, rivals: list[Child], delays: list[float]) -> Child:
    for child, delay in zip(rivals, delays, strict=True):
        child.tell("take", folder, delay)
    answers = [child.answer() for child in rivals]
    (winner,) = (child for child, answer in zip(rivals, answers, strict=True) if answer == "took")
    for answer in answers:
        assert answer == "took" or f"process {winner.pid} on " in answer, answers
        assert answer == "took" or re.search(r" \(Slurm job \d+\), since 2\d{3}-", answer)
        assert answer == "took" or f"{folder}/.lock" in answer
    return winner


@pytest.mark.parametrize("kind", ["locks", "none", "apart"])
def test_of_those_that_come_at_once_one_gets_the_folder(kind, children, tmp_path):
    rivals, draw = children(kind, 3), random.Random(kind)
    for number in range(8):
        delays = [0.0, 0.0, 0.0] if number % 2 else [draw.choice([0.0, draw.random() / 20]) for _ in rivals]
        winner = winner_of(tmp_path, rivals, delays)
        assert unpacked((tmp_path / ".lock").read_bytes()).pid == winner.pid
        assert winner.ask("drop") == "done"
        assert not list(tmp_path.iterdir()), "what a holder leaves"


@pytest.mark.parametrize("kind", ["locks", "none", "apart"])
def test_of_those_that_take_over_from_a_dead_one_one_gets_the_folder(kind, children, tmp_path):
    first, *rivals = children(kind, 4)
    assert first.ask("take", tmp_path, 0) == "took"
    first.kill()
    begun = time.monotonic()
    winner = winner_of(tmp_path, rivals, [0.0, 0.0, 0.0])
    if kind != "locks":
        assert time.monotonic() - begun > PATIENCE, "it must wait for a sign of life"
    assert winner.ask("drop") == "done"


def test_a_step_of_the_same_batch_job_waits_for_the_one_before(children, tmp_path):
    first, second = children("locks", 2, "7")
    assert first.ask("take", tmp_path, 0) == "took"
    second.tell("take", tmp_path, 0)
    time.sleep(0.5)  # meanwhile the holder renews its record
    assert first.ask("drop") == "done"
    assert second.answer() == "took"


def test_a_child_of_the_holder_does_not_keep_the_folder(children, tmp_path):
    first, second = children("locks", 2)
    assert first.ask("take", tmp_path, 0) == "took"
    grandchild = int(first.ask("exec"))
    try:
        first.kill()
        assert second.ask("take", tmp_path, 0) == "took"
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_a_holder_that_is_stopped_keeps_its_lock(children, tmp_path):
    first, second = children("locks", 2)
    assert first.ask("take", tmp_path, 0) == "took"
    os.kill(first.pid, signal.SIGSTOP)
    answer = second.ask("take", tmp_path, 0)
    assert f"process {first.pid} on " in answer


def test_a_holder_that_was_stopped_and_taken_for_dead_knows_it(children, tmp_path):
    """Without locks, other processes cannot distinguish a stopped process from a dead process."""
    first, second = children("none", 2)
    assert first.ask("take", tmp_path, 0) == "took"
    os.kill(first.pid, signal.SIGSTOP)
    assert second.ask("take", tmp_path, 0) == "took"
    os.kill(first.pid, signal.SIGCONT)
    assert f"was taken over by process {second.pid} on " in first.ask("lost")
    assert first.ask("drop") == "done"
    assert unpacked((tmp_path / ".lock").read_bytes()).pid == second.pid, (
        "the first must not remove the second one's lock"
    )


def test_a_file_removed_under_a_living_holder_is_made_again(children, tmp_path):
    first, second = children("locks", 2)
    assert first.ask("take", tmp_path, 0) == "took"
    (tmp_path / ".lock").unlink()
    until((tmp_path / ".lock").exists, "another file")
    assert f"process {first.pid} on " in second.ask("take", tmp_path, 0)


def replace(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    "how", [shutil.rmtree, replace, lambda folder: folder.rename(folder.with_name("elsewhere"))]
)
def test_a_folder_that_goes_is_noticed_and_not_made_again(how, children, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (first,) = children("locks", 1)
    assert first.ask("take", folder, 0) == "took"
    how(folder)
    assert f"{folder} was moved or removed" in first.ask("lost")
    assert first.ask("drop") == "done"
    assert os.listdir(folder) == [] if how is replace else not folder.exists()


STRANGE = [b"", b"no json", b"[" * 5000, b'{"since": 1}', b'{"pid": "1", "since": ""}', b"\xff" * 2000]


def test_a_file_that_says_nothing_is_taken_over_when_it_stands_still(children, tmp_path):
    folders = [tmp_path / str(number) for number in range(len(STRANGE))]
    for folder, content in zip(folders, STRANGE, strict=True):
        folder.mkdir()
        (folder / ".lock").write_bytes(content)
        assert unpacked(content[:SIZE]) is None
    begun, rivals = time.monotonic(), children("locks", len(STRANGE))
    for folder, child in zip(folders, rivals, strict=True):
        child.tell("take", folder, 0)
    assert [child.answer() for child in rivals] == ["took"] * len(STRANGE)
    assert time.monotonic() - begun > PATIENCE
