"""Folders of checkpoints: how a new one appears, what is removed, what is gone on from."""

import os
import threading
from pathlib import Path

import pytest

from zero_mpi.checkpoint import folders

OLD, NEW = b"the old one", b"the new one"


def fill(folder: Path, content: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in (folders.MODEL, folders.OPTIMIZER):
        (folder / name).write_bytes(content)
    return folder


def save(out: Path, step: int, content: bytes = NEW, keep: int = 0) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    return folders.publish(out, step, fill(folders.begin(folders.step_folder(out, step)), content), keep)


def names(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir())


def named(*steps: int) -> list[str]:
    return [f"step-{step:08d}" for step in steps]


def latest(out: Path) -> bytes:
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


def test_a_checkpoint_is_not_seen_before_it_is_published(tmp_path):
    save(tmp_path, 1, OLD)
    folder = fill(folders.begin(folders.step_folder(tmp_path, 2)), NEW)
    assert folders.candidates(tmp_path) == [tmp_path / "step-00000001"]
    folders.publish(tmp_path, 2, folder, 0)
    assert folders.candidates(tmp_path) == [tmp_path / name for name in named(2, 1)]


def test_a_replaced_checkpoint_is_there_at_every_moment(tmp_path):
    """Somebody looks at what `latest` names, again and again, while it is replaced 200 times."""
    first, second = fill(tmp_path / "first", OLD), fill(tmp_path / "second", NEW)
    if not folders.exchange(first, second):
        pytest.skip("this file system cannot exchange two folders")
    assert [(place / folders.MODEL).read_bytes() for place in (first, second)] == [NEW, OLD]
    with pytest.raises(FileNotFoundError) as caught:
        folders.exchange(first, tmp_path / "none")
    assert caught.value.filename == str(tmp_path / "none")
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


def test_a_folder_that_goes_at_this_moment_has_no_entries(tmp_path, monkeypatch):
    """Between two looks at it another process may have moved it."""
    monkeypatch.setattr(Path, "is_dir", lambda path: True)
    folders.clean(tmp_path / "gone")
    assert folders.steps(tmp_path / "gone") == []


def test_clean_leaves_alone_what_is_not_its_own(tmp_path):
    assert folders.clean(tmp_path / "none") is None
    save(tmp_path, 1)
    kept = ["notes", ".step-1.partial", ".step-00000001.partial.gz", ".step-00000001.bak", "x.partial"]
    for name in kept:
        fill(tmp_path / name, OLD)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    os.mkfifo(tmp_path / ".best.partial")  # nobody writes into it: opening it would wait for ever
    kept.append(".best.partial")
    fill(tmp_path / ".step-00000002.partial", NEW)
    (tmp_path / ".latest.partial").symlink_to("step-00000002")
    folders.clean(tmp_path)
    assert names(tmp_path) == sorted(["latest", "metrics.jsonl", *named(1), *kept])


@pytest.mark.parametrize(("keep", "left"), [(0, [1, 2, 3, 4]), (1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4])])
def test_the_newest_are_kept(keep, left, tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    save(tmp_path, 4, keep=keep)
    assert names(tmp_path) == ["latest", *named(*left)]


def save_best(out: Path, step: int, keep: int = 0) -> Path:
    return folders.publish(
        out, step, fill(folders.begin(folders.step_folder(out, step)), NEW), keep, is_best=True
    )


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
    for step in (1, 2, 3, 4):
        age(save(tmp_path, step), 1000 + step)
    folders.point(tmp_path, folders.LATEST, "step-00000003")
    return tmp_path


def found(out: Path) -> list[str]:
    return [path.name for path in folders.candidates(out)]


DEAD = ("step-5", "step-00000006.bak", ".step-00000009.partial")
CHANGES = {  # what becomes of the run, and the steps that it goes on from, in order
    "written later, the link not yet replaced": (lambda run: None, [4, 3, 2, 1]),
    "of a run that started over": (lambda run: age(run / "step-00000004", 999.0), [3, 2, 1]),
    "of a run that went back": (lambda run: age(run / "step-00000004", 1003.0), [3, 2, 1]),
    "a later one lacks a file": (lambda run: (run / "step-00000004" / folders.OPTIMIZER).unlink(), [3, 2, 1]),
    "older ones go by step": (lambda run: age(run / "step-00000001", 5000), [4, 3, 2, 1]),
    "its owner must hear of it": (
        lambda run: [(run / name).rename(run / f"x{name}") for name in named(3, 4)],
        [3, 2, 1],
    ),
    "no link": (lambda run: (run / "latest").unlink(), [4, 3, 2, 1]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_gone_on_from(change, run):
    action, expected = CHANGES[change]
    action(run)
    assert found(run) == named(*expected)


def test_a_link_to_another_place_comes_first(run, tmp_path_factory):
    other = fill(tmp_path_factory.mktemp("other") / "step-00000009", NEW)
    (run / "latest").unlink()
    (run / "latest").symlink_to(other)
    assert folders.candidates(run)[0].resolve() == other
    assert found(run)[1:] == named(4, 3, 2, 1)


def test_what_is_no_checkpoint_is_no_candidate_and_steps_are_numbers(run):
    (run / "latest").unlink()
    for name in DEAD:
        fill(run / name, NEW)
    (run / "step-00000007").write_bytes(NEW)
    (run / "step-00000008").symlink_to("step-00000001")
    assert found(run) == named(4, 3, 2, 1)
    for step in (99999999, 100000000):
        save(run, step)
    (run / "latest").unlink()
    assert found(run)[:2] == ["step-100000000", "step-99999999"]
    assert folders.candidates(run / "none") == []
