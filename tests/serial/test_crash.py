"""If a save is interrupted before any of its file operations, the previous checkpoint still loads.

A save of a tiny model has about forty operations on files. The sweep counts them and stops at the first,
then the second, and so on: by SIGKILL in a forked child, also with a simulated power loss (unsynced
files are empty), or by a system error. After each stop the newest checkpoint is sound, no file with a
final name is partial, and the next save succeeds.
"""

import contextlib
import errno
import itertools
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
from checkpoints import load_checkpoint
from random_kills import sound_step
from test_durable import is_killed

from zero_mpi import SerialComm, ShardedAdamW
from zero_mpi.checkpoint import folders
from zero_mpi.checkpoint.saver import Saver
from zero_mpi.checkpoint.state import Description, TrainingProgress
from zero_mpi.errors import JobError
from zero_mpi.models import Llama

SIZES = {"layers": 1, "dim": 12, "heads": 2, "kv_heads": 1, "ffn": 10, "context": 8, "vocab_size": 23}
CONFIG = Llama.from_flags(SIZES | {"tied": True})
DESCRIPTION = Description("llama", CONFIG.metadata(), {"seed": 0}, {"threads": 1})
CALLS = ("open", "pwritev", "ftruncate", "fsync", "mkdir", "rename", "replace", "symlink", "unlink", "rmdir")


def save(out: Path, step: int, keep: int = 0, seed: int = 0, background: bool = False) -> None:
    saver = Saver(out, STATES[step, seed], DESCRIPTION, keep=keep, background=background)
    saver.save(TrainingProgress(step, 100 * step, 0, step, 2 * step))
    saver.wait()


STATES = {(step, seed): tiny.trained(CONFIG, step, seed) for step, seed in ((1, 0), (2, 0), (2, 1))}


class Operations:
    """Counter of the calls that change files; calls `action` at number `stop_at`."""

    def __init__(self, stop_at: int, action: Callable[[str, tuple[Any, ...]], None]) -> None:
        self.count, self.stop_at, self.action = 0, stop_at, action
        self.opened: dict[int, Opened] = {}  # inode -> file, because handle numbers are reused
        self.real = {name: getattr(os, name) for name in CALLS} | {"exchange": folders.exchange}
        self._lock = threading.Lock()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in CALLS:
            patch.setattr(os, name, self.watching(name))
        patch.setattr(folders, "exchange", self.watching("exchange"))

    def watching(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                self.count += 1
                stops = self.count == self.stop_at
            if stops:
                if name == "pwritev":  # only half of the data is written
                    content = b"".join(arguments[1])
                    self.real[name](arguments[0], [content[: len(content) // 2]], arguments[2])
                self.action(name, arguments)
            result = self.real[name](*arguments, **options)
            self.note(name, arguments, result)
            return result

        return call

    def note(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:
        if name == "open" and arguments[1] & os.O_CREAT:
            self.opened[inode(result)] = Opened(os.dup(result))
        elif name in ("pwritev", "ftruncate", "fsync") and inode(arguments[0]) in self.opened:
            self.opened[inode(arguments[0])].synced = name == "fsync"

    def lose_power(self) -> None:
        """Empty all files that were not synced; names of files stay."""
        for file in self.opened.values():
            if not file.synced:
                self.real["ftruncate"](file.handle, 0)

    def close(self) -> None:
        for file in self.opened.values():
            os.close(file.handle)


@dataclass
class Opened:
    handle: int
    synced: bool = False


def inode(handle: int) -> int:
    return os.fstat(handle).st_ino


@dataclass(frozen=True)
class Case:
    before: tuple[tuple[int, int], ...]  # (step, seed) of earlier checkpoints, in order
    after: tuple[int, ...]
    keep: int = 0
    exchanges: bool = True


CASES = {
    "the first one": Case((), (2,)),
    "after another": Case(((1, 0),), (1, 2)),
    "keep 1": Case(((1, 0),), (2,), keep=1),
    "the same step again": Case(((1, 0), (2, 1)), (1, 2)),
    "the same step again without exchange": Case(((1, 0), (2, 1)), (1, 2), exchanges=False),
}


@pytest.fixture(params=CASES)
def case(request, monkeypatch) -> Case:
    chosen = CASES[request.param]
    if not chosen.exchanges:
        monkeypatch.setattr(folders, "exchange", lambda first, second: False)
    return chosen


@pytest.fixture
def start(case, tmp_path) -> Callable[[], Path]:
    template = tmp_path / "template"
    template.mkdir()
    for step, seed in case.before:
        save(template, step, seed=seed)

    def make() -> Path:
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(template, out, symlinks=True)
        return out

    return make


@pytest.fixture(scope="module")
def complete(tmp_path_factory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("complete")
    save(out, 2)
    return contents(out / "latest")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_nothing_lost(out: Path, case: Case) -> None:
    """Check that the newest checkpoint loads and that no partial one has a final name."""
    checkpoints = folders.candidates(out)
    assert checkpoints or not case.before
    minimum = max((step for step, _ in case.before), default=2)
    for folder in checkpoints[:1]:
        assert sound_step(folder.resolve()) >= minimum
        optimizer = ShardedAdamW(tiny.make(SerialComm(), CONFIG, seed=7))
        assert load_checkpoint(folder, optimizer).step >= minimum
    for step, folder in folders.steps(out):
        assert sound_step(folder) == step


def assert_goes_on(out: Path, case: Case, complete: dict[str, bytes]) -> None:
    save(out, 2, case.keep)
    names = [folders.step_folder(out, step).name for step in case.after]
    assert sorted(path.name for path in out.iterdir()) == ["latest", *names]
    assert contents(out / "latest") == complete


def save_and_die(out: Path, case: Case, stop_at: int, power: bool) -> None:
    def die(name: str, arguments: tuple[Any, ...]) -> None:
        if power:
            operations.lose_power()
        os.kill(os.getpid(), signal.SIGKILL)

    operations = Operations(stop_at, die)
    operations.install(pytest.MonkeyPatch())
    save(out, 2, case.keep)


@pytest.mark.parametrize("power", [True, False], ids=["power lost", "killed"])
def test_a_save_may_be_killed_before_any_operation(power, case, start, complete):
    for stop_at in itertools.count(1):
        out = start()
        killed = is_killed(lambda out=out, stop=stop_at: save_and_die(out, case, stop, power))
        if case.exchanges:  # otherwise this holds only after the clean-up
            assert_nothing_lost(out, case)
        folders.clean(out)
        assert_nothing_lost(out, case)
        assert_goes_on(out, case, complete)
        if not killed:
            break
    assert stop_at > 25, "the sweep has not seen the operations of a save"


@contextlib.contextmanager
def failing(stop_at: int, number: int) -> Iterator[Operations]:
    """Fail operation `stop_at` with a system error."""

    def refuse(name: str, arguments: tuple[Any, ...]) -> None:
        names = () if name in ("pwritev", "ftruncate", "fsync") else (str(arguments[0]),)
        if name in ("rename", "replace", "symlink"):
            names = (*names, None, str(arguments[1]))
        raise OSError(number, os.strerror(number), *names)

    operations = Operations(stop_at, refuse)
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(operations):
        operations.install(patch)
        yield operations


def save_refused(out: Path, case: Case, stop_at: int, number: int, background: bool) -> tuple[bool, str]:
    """Save step 2 with operation `stop_at` failing; return whether it was reached, and the error."""
    with failing(stop_at, number) as operations:
        try:
            save(out, 2, case.keep, background=background)
        except JobError as error:
            return True, str(error)
    return operations.count >= stop_at, ""


@pytest.mark.parametrize(("name", "background"), [("ENOSPC", False), ("EIO", True)])
def test_a_save_may_be_refused_any_operation(name, background, case, start, complete):
    number, count = getattr(errno, name), 0
    for stop_at in itertools.count(1):
        out = start()
        raised, text = save_refused(out, case, stop_at, number, background)
        if text:
            count += 1
            assert os.strerror(number) in text
            assert str(out) in text or any(f in text for f in (folders.MODEL, folders.OPTIMIZER)), text
            assert "\n" not in text
            assert not list(out.glob(".step-*.partial")), f"a partial folder was left: {text}"
        assert_nothing_lost(out, case)
        assert_goes_on(out, case, complete)
        if not raised:
            break
    assert count > 20, "the sweep has not seen the operations of a save"
