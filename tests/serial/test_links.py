"""No command changes or removes the targets of links in a run folder or a token folder.

Any user with write access to the folder can replace a file of the job by a link.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import run_job
from test_command_bits import SIZES, needs_mpiexec, train, write_text

from zero_mpi.checkpoint.parallel_write import OutputFile
from zero_mpi.commands.tokenize.work_folder import WorkFolder
from zero_mpi.errors import UsageError
from zero_mpi.files.atomic import write_to_disk
from zero_mpi.launch.folder_lock import make_and_take as take
from zero_mpi.telemetry.events import append_line
from zero_mpi.telemetry.proof import JobStart, Proof
from zero_mpi.telemetry.status import overwrite
from zero_mpi.train.timeline import write_parts

PRECIOUS = "what somebody else has written\n"
LINKS: dict[str, Callable[[Path, Path], None]] = {"symbolic": os.symlink, "hard": os.link}
WRITERS: dict[str, Callable[[Path], object]] = {  # name of a writer -> function that writes to a path
    "proof": lambda path: Proof(path, JobStart(0, {})),
    "events": lambda path: append_line(path, "{}"),
    "status": lambda path: overwrite(path, b"{}"),
    "partial": lambda path: write_to_disk(path, b"new"),
    "checkpoint": OutputFile,
    "trace": lambda path: write_parts(path.with_name(path.name[1:].removesuffix(".partial")), [b"new"]),
}
FLAGS = [*SIZES, "--steps", "2", "--sample", "0", "--batch-size", "4", "--eval-every", "0", "--warmup", "2"]


@pytest.fixture
def precious(tmp_path) -> Path:
    path = tmp_path / "elsewhere" / "precious"
    path.parent.mkdir()
    path.write_text(PRECIOUS)
    (tmp_path / "out").mkdir()
    return path


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_in_place_is_a_file_of_its_own(name, link, precious, tmp_path):
    path = tmp_path / "out" / ".file.partial"
    LINKS[link](precious, path)
    with pytest.raises(OSError, match="link") as refused:
        WRITERS[name](path)
    assert str(refused.value.filename) in (str(path), str(path.with_name("file")))
    assert precious.read_text() == PRECIOUS


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("name", [".lock", "proof.jsonl", "metrics.jsonl", "events.jsonl"])
def test_a_run_folder_with_a_link_is_refused_before_anything_is_touched(name, link, precious, tmp_path):
    LINKS[link](precious, tmp_path / "out" / name)
    with pytest.raises(UsageError, match="link") as refused:
        take(tmp_path / "out")
    assert str(tmp_path / "out" / name) in str(refused.value)
    assert precious.read_text() == PRECIOUS
    assert os.listdir(tmp_path / "out") == [name]


def test_the_holder_of_a_folder_that_was_copied_by_hard_links_lets_it_go(tmp_path):
    lock = take(tmp_path)
    os.link(tmp_path / ".lock", tmp_path / "backup")
    lock._give_sign()
    lock.release()
    assert not lock.problem
    assert os.listdir(tmp_path) == ["backup"]


@needs_mpiexec
def test_a_run_names_the_link_and_ends_and_goes_on_without_it(tmp_path):
    """The run folder itself may be a link, and a backup may hard-link the files of checkpoints."""
    flags, real, out = [*FLAGS, "--data", *write_text(tmp_path)], tmp_path / "real", tmp_path / "out"
    real.mkdir()
    out.symlink_to(real)
    train(2, out, *flags)
    shutil.copytree(real / "step-00000002", tmp_path / "backup", copy_function=os.link)
    proof = (real / "proof.jsonl").rename(tmp_path / "proof")
    before = proof.read_bytes()
    command = ["-m", "zero_mpi.train", *flags, "--steps", "3", "--out", str(out)]
    for make in LINKS.values():
        make(proof, real / "proof.jsonl")
        status, _, errors = run_job(2, command)
        assert (status, proof.read_bytes()) == (2, before)
        assert len(errors.splitlines()) == 1
        assert str(out / "proof.jsonl") in errors
        (real / "proof.jsonl").unlink()
    train(2, out, *flags, "--steps", "3", "--keep", "1")
    assert os.readlink(out / "latest") == "step-00000003"
    assert (tmp_path / "backup" / "model.gguf").stat().st_nlink == 1


@needs_mpiexec
def test_tokenize_removes_nothing_that_it_has_not_written(precious, tmp_path):
    out = tmp_path / "out"
    flags = ["-m", "zero_mpi", "tokenize", *write_text(tmp_path), "--tokenizer", "byte"]
    (out / ".tokenize").symlink_to(precious.parent)
    status, _, errors = run_job(2, [*flags, "--out", str(out)])
    assert status == 2
    assert len(errors.splitlines()) == 1
    assert ".tokenize" in errors
    assert precious.read_text() == PRECIOUS
    (out / ".tokenize").unlink()
    (out / ".tokenize").mkdir()
    others = [out / name for name in (".notes.partial", "mine.bin", ".tokenize/notes", ".tokenize/a.json")]
    for path in (*others, out / ".tokenize" / "00007.bin", out / "00008.idx"):
        path.write_text(PRECIOUS)
    assert run_job(2, [*flags, "--out", str(out)])[0] == 0
    assert [path.read_text() for path in others] == [PRECIOUS] * len(others)
    assert {path.name for path in (out / ".tokenize").iterdir()} == {"notes", "a.json"}
    assert not (out / "00008.idx").exists()


def test_the_work_folder_of_a_complete_one_is_no_link_either(precious, tmp_path):
    (tmp_path / "out" / ".tokenize").symlink_to(precious.parent)
    (tmp_path / "out" / "manifest.json").write_text("{}")
    with pytest.raises(UsageError, match=r"\.tokenize"):
        WorkFolder(tmp_path / "out", {})
