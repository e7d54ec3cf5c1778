"""Folders of checkpoints: how a new one appears, what is removed, what is gone on from.

A folder here holds two small files that say who wrote it; `checkpoint.folders` never looks into them. A crash
is an exception that nothing catches, raised where the process would have died.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zero_mpi.checkpoint import folders

OLD, NEW = b"the old one", b"the new one"


class Crash(BaseException):
    """The process ends here."""


@contextlib.contextmanager
def dying_in(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, action: Callable[..., Any]):
    """The process dies in the body, by `action`, which stands for `owner.name`."""
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, action)
        with pytest.raises(Crash):
            yield


def fill(folder: Path, content: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in (folders.MODEL, folders.OPTIMIZER):
        (folder / name).write_bytes(content)
    return folder


def save(out: Path, step: int, content: bytes = NEW, keep: int = 0) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    return folders.publish(out, step, fill(folders.begin(out, step), content), keep)


def names(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir())


def named(*steps: int) -> list[str]:
    return [f"step-{step:08d}" for step in steps]


def latest(out: Path) -> bytes:
    """What the newest checkpoint holds; both files must agree."""
    model, state = ((out / "latest" / name).read_bytes() for name in (folders.MODEL, folders.OPTIMIZER))
    assert model == state
    return model


def age(folder: Path, seconds: float) -> None:
    for path in folder.iterdir():
        os.utime(path, (seconds, seconds))


def test_a_checkpoint_appears_under_its_name_and_latest_names_it(tmp_path):
    out = tmp_path / "run" / "deep"
    assert save(out, 7) == out / "step-00000007"
    assert names(out) == ["latest", *named(7)]
    assert os.readlink(out / "latest") == "step-00000007"  # relative: the run may be moved
    assert latest(out) == NEW
    assert save(out, 123456789) == out / "step-123456789"
    assert os.readlink(out / "latest") == "step-123456789"


def test_begin_gives_an_empty_folder_whatever_was_left(tmp_path):
    fill(tmp_path / ".step-00000007.partial" / "sub", OLD)
    assert list(folders.begin(tmp_path, 7).iterdir()) == []


def test_a_checkpoint_is_not_seen_before_it_is_published(tmp_path):
    save(tmp_path, 1, OLD)
    folder = fill(folders.begin(tmp_path, 2), NEW)
    assert folders.candidates(tmp_path) == [tmp_path / "step-00000001"]
    folders.publish(tmp_path, 2, folder, 0)
    assert folders.candidates(tmp_path) == [tmp_path / name for name in named(2, 1)]


def can_exchange(folder: Path) -> bool:
    first, second = fill(folder / "first", OLD), fill(folder / "second", NEW)
    return folders.exchange(first, second)


def test_exchange_lets_two_folders_change_names(tmp_path):
    if not can_exchange(tmp_path):
        pytest.skip("this file system cannot exchange two folders")
    assert (tmp_path / "first" / folders.MODEL).read_bytes() == NEW
    assert (tmp_path / "second" / folders.MODEL).read_bytes() == OLD


def test_exchange_names_the_file_that_it_cannot_find(tmp_path):
    if not can_exchange(tmp_path):
        pytest.skip("this file system cannot exchange two folders")
    with pytest.raises(FileNotFoundError) as caught:
        folders.exchange(tmp_path / "first", tmp_path / "none")
    assert caught.value.filename == str(tmp_path / "none")


def test_a_replaced_checkpoint_is_there_at_every_moment(tmp_path):
    """Somebody looks at what `latest` names, again and again, while it is replaced 200 times."""
    if not can_exchange(tmp_path / "probe"):
        pytest.skip("this file system cannot exchange two folders")
    out, missing, looks, done = tmp_path / "run", [], [], threading.Event()
    save(out, 5, OLD)

    def look() -> None:
        while not done.is_set():
            looks.append(1)
            if not (out / "latest").exists():
                missing.append(len(looks))

    reader = threading.Thread(target=look)
    reader.start()
    for _ in range(100):
        save(out, 5, NEW)
        save(out, 5, OLD)
    done.set()
    reader.join()
    assert missing == []
    assert len(looks) > 200
    assert names(out) == ["latest", *named(5)]


def test_a_checkpoint_is_replaced_without_exchange_too(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "exchange", lambda first, second: False)
    save(tmp_path, 5, OLD)
    save(tmp_path, 5, NEW)
    assert latest(tmp_path) == NEW
    assert names(tmp_path) == ["latest", *named(5)]


def test_a_crash_between_the_two_renames_gives_the_old_one_back(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "exchange", lambda first, second: False)
    save(tmp_path, 5, OLD)
    rename = Path.rename

    def die_before_new(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise Crash
        return rename(self, target)

    with dying_in(monkeypatch, Path, "rename", die_before_new):
        save(tmp_path, 5, NEW)
    assert not (tmp_path / "step-00000005").exists(), "the crash did not come between the renames"
    folders.clean(tmp_path)
    assert latest(tmp_path) == OLD
    assert names(tmp_path) == ["latest", *named(5)]
    assert folders.candidates(tmp_path) == [tmp_path / "step-00000005"]


def test_a_refused_second_rename_puts_the_old_one_back_at_once(tmp_path, monkeypatch):
    """Nobody need start again for it: the run itself may go on from there."""
    monkeypatch.setattr(folders, "exchange", lambda first, second: False)
    save(tmp_path, 5, OLD)
    rename = Path.rename

    def refuse_new(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise OSError(28, "No space left on device", str(self), None, str(target))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse_new)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 5, NEW)
    assert latest(tmp_path) == OLD


def test_clean_does_not_bring_back_what_was_being_removed(tmp_path, monkeypatch):
    """A checkpoint that was half removed when the process died is no checkpoint."""
    save(tmp_path, 1, OLD)
    with dying_in(monkeypatch, folders.shutil, "rmtree", die_half_way):
        save(tmp_path, 2, NEW, keep=1)
    assert ".step-00000001.old" in names(tmp_path), "the crash did not come while removing"
    folders.clean(tmp_path)
    assert names(tmp_path) == ["latest", *named(2)]


def die_half_way(folder: Path, ignore_errors: bool = False) -> None:
    if folder.exists():
        (folder / folders.MODEL).unlink()
        raise Crash


def test_clean_leaves_alone_what_is_not_its_own(tmp_path):
    assert folders.clean(tmp_path / "none") is None
    save(tmp_path, 1)
    kept = ["notes", ".step-1.partial", ".step-00000001.partial.gz", ".step-00000001.bak", "x.partial"]
    for name in kept:
        fill(tmp_path / name, OLD)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    fill(tmp_path / ".step-00000002.partial", NEW)
    (tmp_path / ".latest.partial").symlink_to("step-00000002")
    folders.clean(tmp_path)
    assert names(tmp_path) == sorted(["latest", "metrics.jsonl", *named(1), *kept])


def test_latest_is_replaced_in_one_step(tmp_path):
    save(tmp_path, 1, OLD)
    save(tmp_path, 2, NEW)
    (tmp_path / ".latest.partial").symlink_to("step-00000009")  # of a process that died before the rename
    folders.point(tmp_path, folders.LATEST, "step-00000001")
    assert os.readlink(tmp_path / "latest") == "step-00000001"
    assert names(tmp_path) == ["latest", *named(1, 2)]


def test_latest_stays_where_it_cannot_be_replaced(tmp_path, monkeypatch):
    save(tmp_path, 1, OLD)
    with dying_in(monkeypatch, Path, "replace", die):
        save(tmp_path, 2, NEW)
    assert os.readlink(tmp_path / "latest") == "step-00000001"
    assert names(tmp_path) == [".latest.partial", "latest", *named(1, 2)]
    folders.clean(tmp_path)
    assert names(tmp_path) == ["latest", *named(1, 2)]


def die(*arguments: object) -> None:
    raise Crash


@pytest.mark.parametrize("call", ["fsync", "symlink"])
def test_an_error_names_the_file_that_was_to_be_written(call, tmp_path, monkeypatch):
    """The system's own error names nothing for a handle, and a link's target for a link."""

    def refuse(*arguments: object, **more: object) -> None:
        raise OSError(
            28, "No space left on device", *([arguments[0], None, arguments[1]] if call == "symlink" else [])
        )

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(OSError, match="No space left") as caught:
        save(tmp_path, 1)
    assert Path(caught.value.filename).parent in (tmp_path, tmp_path.parent)


@pytest.mark.parametrize(("keep", "left"), [(0, [1, 2, 3, 4]), (1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4])])
def test_the_newest_are_kept(keep, left, tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    save(tmp_path, 4, keep=keep)
    assert names(tmp_path) == ["latest", *named(*left)]


def save_best(out: Path, step: int, keep: int = 0) -> Path:
    return folders.publish(out, step, fill(folders.begin(out, step), NEW), keep, is_best=True)


@pytest.mark.parametrize(("keep", "left"), [(0, [1, 2, 3, 4]), (1, [2, 4]), (2, [2, 3, 4])])
def test_the_best_is_kept_beside_the_newest(keep, left, tmp_path):
    save(tmp_path, 1)
    save_best(tmp_path, 2)
    save(tmp_path, 3)
    save(tmp_path, 4, keep=keep)
    assert os.readlink(tmp_path / "best") == "step-00000002"
    assert names(tmp_path) == ["best", "latest", *named(*left)]


def test_a_new_best_lets_the_old_one_go(tmp_path):
    save_best(tmp_path, 1, keep=1)
    save(tmp_path, 2, keep=1)
    save_best(tmp_path, 3, keep=1)
    assert os.readlink(tmp_path / "best") == os.readlink(tmp_path / "latest") == "step-00000003"
    assert names(tmp_path) == ["best", "latest", *named(3)]


def test_best_is_pointed_elsewhere_or_removed(tmp_path):
    save_best(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / ".best.partial").symlink_to("step-00000002")
    folders.point_best(tmp_path, 2)
    assert os.readlink(tmp_path / "best") == "step-00000002"
    folders.point_best(tmp_path, 0)
    folders.point_best(tmp_path, 0)
    (tmp_path / ".best.partial").symlink_to("step-00000002")
    folders.clean(tmp_path)
    assert names(tmp_path) == ["latest", *named(1, 2)]


def test_the_best_that_was_moved_aside_gets_its_name_back(tmp_path):
    save_best(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "step-00000001").rename(tmp_path / ".step-00000001.old")
    folders.clean(tmp_path)
    assert names(tmp_path) == ["best", "latest", *named(1, 2)]


def test_later_ones_of_another_run_are_neither_removed_nor_counted(tmp_path):
    for step in (1, 2, 8, 9):
        save(tmp_path, step)
    folders.remove_old(tmp_path, 2, 1)
    assert names(tmp_path) == ["latest", *named(2, 8, 9)]


def test_nothing_is_removed_before_the_new_one_and_its_link_are_on_disk(tmp_path, monkeypatch):
    """What would be lost with the power at any moment: the order of the calls is the proof."""
    for step in (1, 2):
        save(tmp_path, step)
    calls: list[str] = []
    watch(monkeypatch, calls)
    save(tmp_path, 3, keep=1)
    expected = ["sync .step-00000003.partial", "rename step-00000003", f"sync {tmp_path.name}"]
    expected += ["replace latest", f"sync {tmp_path.name}"]
    expected += ["rename .step-00000001.old", "rename .step-00000002.old"]
    assert calls == expected


def watch(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    sync, rename, replace = folders.sync_folder, Path.rename, Path.replace

    def noting(what, action, which):
        def note(*arguments):
            calls.append(f"{what} {arguments[which].name}")
            return action(*arguments)

        return note

    monkeypatch.setattr(folders, "sync_folder", noting("sync", sync, 0))
    monkeypatch.setattr(Path, "rename", noting("rename", rename, 1))
    monkeypatch.setattr(Path, "replace", noting("replace", replace, 1))


@pytest.fixture
def run(tmp_path) -> Path:
    """Checkpoints of steps 1 to 4, written in this order; `latest` names 3."""
    for step in (1, 2, 3, 4):
        age(save(tmp_path, step), 1000 + step)
    folders.point(tmp_path, folders.LATEST, "step-00000003")
    return tmp_path


def found(out: Path) -> list[str]:
    return [path.name for path in folders.candidates(out)]


def test_no_folder_and_no_checkpoint(tmp_path):
    assert folders.candidates(tmp_path / "none") == []
    assert folders.candidates(tmp_path) == []


def test_a_later_one_that_was_written_later_goes_first(run):
    """The process died after the rename and before the link was replaced."""
    assert found(run) == named(4, 3, 2, 1)


@pytest.mark.parametrize("written", [999.0, 1003.0])
def test_later_ones_of_a_run_that_was_given_up_are_left_out(written, run):
    """A run that started over, or went back, writes lower steps than those that are there."""
    age(run / "step-00000004", written)
    assert found(run) == named(3, 2, 1)


def test_a_later_one_without_files_is_left_out(run):
    (run / "step-00000004" / folders.OPTIMIZER).unlink()
    assert found(run) == named(3, 2, 1)


def test_older_ones_come_by_step_whenever_they_were_written(run):
    age(run / "step-00000001", 5000)
    assert found(run) == named(4, 3, 2, 1)


def test_a_link_to_what_is_gone_is_still_the_first(run):
    """Its owner must hear of it, before an older one is taken."""
    (run / "step-00000003").rename(run / "elsewhere")
    (run / "step-00000004").rename(run / "elsewhere too")
    assert found(run) == named(3, 2, 1)


def test_a_link_to_another_place_comes_first(run, tmp_path_factory):
    other = fill(tmp_path_factory.mktemp("other") / "step-00000009", NEW)
    (run / "latest").unlink()
    (run / "latest").symlink_to(other)
    assert folders.candidates(run)[0].resolve() == other
    assert found(run)[1:] == named(4, 3, 2, 1)


def test_without_a_link_the_highest_step_comes_first(run):
    (run / "latest").unlink()
    assert found(run) == named(4, 3, 2, 1)


def test_what_is_no_checkpoint_is_no_candidate(run):
    (run / "latest").unlink()
    fill(run / "step-5", NEW)
    fill(run / "step-00000006.bak", NEW)
    (run / "step-00000007").write_bytes(NEW)
    (run / "step-00000008").symlink_to("step-00000001")
    fill(run / ".step-00000009.partial", NEW)
    assert found(run) == named(4, 3, 2, 1)


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (99999999, 100000000):
        save(tmp_path, step)
    (tmp_path / "latest").unlink()
    assert found(tmp_path) == ["step-100000000", "step-99999999"]
