"""Tests of checkpoint folders: which of them are kept, removed and resumed."""

import os
from pathlib import Path

import pytest

from zero_mpi.checkpoint import folders


def fill(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in (folders.MODEL, folders.OPTIMIZER):
        (folder / name).touch()
    return folder


def save(out: Path, step: int, keep: int = 0, is_best: bool = False) -> Path:
    folder = fill(folders.begin(folders.step_folder(out, step)))
    return folders.publish(out, step, folder, keep, is_best)


def names(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir())


def named(*steps: int) -> list[str]:
    return [f"step-{step:08d}" for step in steps]


def age(folder: Path, seconds: float) -> None:
    for path in folder.iterdir():
        os.utime(path, (seconds, seconds))


def test_a_folder_that_goes_at_this_moment_has_no_entries(tmp_path, monkeypatch):
    """Another process may move a folder at any time."""
    monkeypatch.setattr(Path, "is_dir", lambda path: True)
    folders.clean(tmp_path / "gone")
    assert folders.steps(tmp_path / "gone") == []


def test_clean_leaves_alone_what_is_not_its_own(tmp_path):
    assert folders.clean(tmp_path / "none") is None
    save(tmp_path, 1)
    foreign = ["notes", ".step-1.partial", ".step-00000001.partial.gz", ".step-00000001.bak", "x.partial"]
    for name in foreign:
        fill(tmp_path / name)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    os.mkfifo(tmp_path / ".best.partial")  # a pipe, which would block if it were opened
    foreign.append(".best.partial")
    fill(tmp_path / ".step-00000002.partial")
    (tmp_path / ".latest.partial").symlink_to("step-00000002")
    folders.clean(tmp_path)
    assert names(tmp_path) == sorted(["latest", "metrics.jsonl", *named(1), *foreign])


@pytest.mark.parametrize(("keep", "left"), [(0, [1, 2, 3, 4]), (1, [2, 4]), (2, [2, 3, 4])])
def test_the_best_is_kept_beside_the_newest(keep, left, tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2, is_best=True)
    save(tmp_path, 3)
    save(tmp_path, 4, keep=keep)
    assert os.readlink(tmp_path / "best") == "step-00000002"
    assert names(tmp_path) == ["best", "latest", *named(*left)]


def test_the_best_that_was_moved_aside_gets_its_name_back(tmp_path):
    save(tmp_path, 1, is_best=True)
    save(tmp_path, 2)
    (tmp_path / "step-00000001").rename(tmp_path / ".step-00000001.old")
    folders.clean(tmp_path)
    assert names(tmp_path) == ["best", "latest", *named(1, 2)]


def test_later_ones_of_another_run_are_neither_removed_nor_counted(tmp_path):
    for step in (1, 2, 8, 9):
        save(tmp_path, step)
    folders.remove_old(tmp_path, 2, 1)
    assert names(tmp_path) == ["latest", *named(2, 8, 9)]


@pytest.fixture
def run(tmp_path) -> Path:
    for step in (1, 2, 3, 4):
        age(save(tmp_path, step), 1000 + step)
    folders.point(tmp_path, folders.LATEST, "step-00000003")
    (tmp_path / "metrics.jsonl").write_text('{"step": 4}\n')
    return tmp_path


def found(out: Path) -> list[str]:
    return [path.name for path in folders.candidates(out)]


DEAD = ("step-5", "step-00000006.bak", ".step-00000009.partial")
CHANGES = {  # (change of the run, steps from which it may resume, in order)
    "written later, the link not yet replaced": (lambda run: None, [4, 3, 2, 1]),
    "of a run that started over": (lambda run: age(run / "step-00000004", 999.0), [3, 2, 1]),
    "of a run that went back": (lambda run: age(run / "step-00000004", 1003.0), [3, 2, 1]),
    "a later one lacks a file": (lambda run: (run / "step-00000004" / folders.OPTIMIZER).unlink(), [3, 2, 1]),
    "in a copy of a run that went back": (
        lambda run: (run / "metrics.jsonl").write_text('{"step": 3}\n'),
        [3, 2, 1],
    ),
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
    other = fill(tmp_path_factory.mktemp("other") / "step-00000009")
    (run / "latest").unlink()
    (run / "latest").symlink_to(other)
    assert folders.candidates(run)[0].resolve() == other
    assert found(run)[1:] == named(4, 3, 2, 1)


def test_what_is_no_checkpoint_is_no_candidate_and_steps_are_numbers(run):
    (run / "latest").unlink()
    for name in DEAD:
        fill(run / name)
    (run / "step-00000007").touch()
    (run / "step-00000008").symlink_to("step-00000001")
    assert found(run) == named(4, 3, 2, 1)
    for step in (99999999, 100000000):
        save(run, step)
    (run / "latest").unlink()
    assert found(run)[:2] == ["step-100000000", "step-99999999"]
    assert folders.candidates(run / "none") == []
