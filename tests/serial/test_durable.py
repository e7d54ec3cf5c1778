"""Small files of a run are always complete, even if a file operation fails or the process is killed."""

import errno
import itertools
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from zero_mpi.config.settings import Config
from zero_mpi.config.toml import write_config
from zero_mpi.errors import FileError, JobError
from zero_mpi.files.atomic import append_whole, write_output, write_whole
from zero_mpi.telemetry.metrics import keep_until
from zero_mpi.telemetry.status import DONE, Status

CALLS = ("open", "write", "fsync", "replace")
WRITERS: dict[str, Callable[[Path], object]] = {
    "any": lambda out: write_whole(out / "any", "new " * 999),
    "config.toml": lambda out: write_config(out, Config(steps=7)),
    "metrics.jsonl": lambda out: keep_until(out / "metrics.jsonl", 1),
    "status.json": lambda out: Status(out, 0, 1, 5).end(DONE),
}
OLD = '{"step": 1}\n{"step": 2}\n'


class Stopping:
    """Counter of calls that runs `action` at number `stop_at`; a write is interrupted halfway."""

    def __init__(self, stop_at: int, action: Callable[[], object]) -> None:
        self.count, self.stop_at, self.action = 0, stop_at, action
        self.thread = threading.get_ident()  # other threads, of earlier tests, are not counted

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in CALLS:
            patch.setattr(os, name, self.watching(name, getattr(os, name)))

    def watching(self, name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            if threading.get_ident() != self.thread:
                return real(*arguments, **options)
            self.count += 1
            if self.count == self.stop_at:
                if name == "write":
                    real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                self.action()
            return real(*arguments, **options)

        return call


def refuse() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(params=WRITERS)
def name(request, tmp_path) -> str:
    (tmp_path / request.param).write_text(OLD)
    return request.param


def written(name: str, folder: Path) -> str:
    folder.mkdir()
    (folder / name).write_text(OLD)
    WRITERS[name](folder)
    return (folder / name).read_text().replace(str(folder), "OUT")


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except (OSError, JobError, FileError) as error:
        return str(error)
    return ""


def test_a_file_whose_writing_is_refused_is_as_it_was(name, tmp_path):
    for stop_at in itertools.count(1):
        with pytest.MonkeyPatch.context() as patch:
            stopping = Stopping(stop_at, refuse)
            stopping.install(patch)
            error = error_of(lambda: WRITERS[name](tmp_path))
        for word in (str(tmp_path / name), os.strerror(errno.ENOSPC)):
            assert not error or word in error
        if stopping.count < stop_at:
            break
        content = (tmp_path / name).read_text()
        assert content == OLD or name == "status.json", "only status.json may be overwritten"
        assert content.strip(), "an empty file"
        assert [path.name for path in tmp_path.iterdir()] == [name]
    assert stop_at > 4, "the sweep has not seen the calls of a write"


def write_and_die(name: str, out: Path, stop_at: int) -> None:
    Stopping(stop_at, die).install(pytest.MonkeyPatch())
    WRITERS[name](out)


def test_a_file_whose_writer_is_killed_is_the_old_or_the_new_one(name, tmp_path):
    new = written(name, tmp_path / "whole")
    (tmp_path / "out").mkdir()
    for stop_at in itertools.count(1):
        (tmp_path / "out" / name).write_text(OLD)
        killed = is_killed(lambda stop=stop_at: write_and_die(name, tmp_path / "out", stop))
        content = (tmp_path / "out" / name).read_text().replace(str(tmp_path / "out"), "OUT")
        assert content in (OLD, new) or name == "status.json"
        assert content[-2:] in (OLD[-2:], new[-2:]), "half a file"
        if not killed:
            break
    assert stop_at > 4
    assert content != OLD


def is_killed(action: Callable[[], object]) -> bool:
    """Run action() in a forked child and return whether the child was killed; action() must not raise."""
    with warnings.catch_warnings():  # the suite's own watchdog is a thread, which the child does not need
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status != 0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_record_is_there_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text(OLD)
    with path.open("ab", buffering=0) as file:
        Stopping(1, refuse).install(monkeypatch)
        with pytest.raises(OSError, match="No space left") as caught:
            append_whole(file, b'{"step": 3}\n')
        assert caught.value.filename == str(path)
        assert path.read_text() == OLD
        append_whole(file, b'{"step": 3}\n')
    assert path.read_text() == OLD + '{"step": 3}\n'


def test_what_lies_where_a_file_is_written_does_not_lead_elsewhere(tmp_path):
    victim, path = tmp_path / "victim", tmp_path / "file"
    victim.write_text("safe")
    for make in (lambda place: place.symlink_to(victim), os.mkfifo):
        make(tmp_path / ".file.partial")
        with pytest.raises(OSError, match=str(path)):
            write_whole(path, "new")
        assert victim.read_text() == "safe"
        write_whole(path, "new")


def test_a_device_stays_one(tmp_path):
    """The text is written to the device, although root could replace /dev/null by a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_output(pipe, "text")
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    before = os.stat("/dev/null")
    write_output(Path("/dev/null"), "text")
    assert (os.stat("/dev/null").st_rdev, os.stat("/dev/null").st_mode) == (before.st_rdev, before.st_mode)
    assert list(tmp_path.iterdir()) == [pipe]
