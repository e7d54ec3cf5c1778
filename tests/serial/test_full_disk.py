"""A full or read-only disk ends the job with one line, and the previous checkpoint loads.

The tests mount small file systems. Ranks continue training during a background save, so the job ends at a
later step.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jobs import run_command, run_job, status_of
from patched import train_with
from test_command_bits import fields, files, needs_mpiexec, train, write_text
from test_failures import SMALL

from zero_mpi.checkpoint.sound import check_digests, open_checkpoint

pytestmark = needs_mpiexec
KEPT = [*SMALL, "--keep", "0", "--save-every", "2"]
SAVES = {
    "now": [],
    "async": ["--async-save"],
    "parallel": ["--checkpoint-io", "parallel"],
    "async parallel": ["--async-save", "--checkpoint-io", "parallel"],
}
Mount = Callable[..., None]


@pytest.fixture
def mount() -> Iterator[Mount]:
    mounted: list[Path] = []

    def mount(place: Path, *options: str) -> None:
        place.mkdir(exist_ok=True)
        try:
            result = subprocess.run(["mount", *options, str(place)], capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("no program mount")
        if result.returncode:
            pytest.skip(f"cannot mount here: {result.stderr.strip()}")
        mounted.append(place)

    yield mount
    for place in mounted:  # a folder may have several mounts
        while subprocess.run(["umount", "-l", str(place)], capture_output=True).returncode == 0:
            pass


@pytest.fixture
def small_disk(mount, tmp_path) -> Path:
    mount(tmp_path / "disk", "-t", "tmpfs", "-o", "size=320k", "tmpfs")
    return tmp_path / "disk"


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    return [*KEPT, "--data", *write_text(tmp_path_factory.mktemp("text"))]


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory) -> Path:
    """Return the folder of an unbroken run of four steps."""
    out = tmp_path_factory.mktemp("whole") / "out"
    train(1, out, *flags, "--steps", "4")
    return out


def assert_one_line(errors: str, cause: str) -> None:
    (line,) = errors.splitlines()
    assert line.startswith("zero_mpi train: error: ")
    assert cause in line
    assert re.search(r"(model|optimizer)\.gguf|step-\d{8}", line), "the file"


def assert_goes_on(out: Path, flags: list[str], reference: Path, target: Path) -> None:
    """Check that the checkpoint of step 2 is sound and that a resume equals the unbroken run."""
    assert (out / "latest").readlink() == Path("step-00000002")
    check_digests(open_checkpoint(out / "latest"))
    assert not list(out.glob(".step-*")), "a partial folder was left"
    assert [path.name for path in out.glob("step-*")] == ["step-00000002"]
    assert "at step 2" in train(2, target, *flags, "--steps", "4", "--resume", str(out / "latest"))
    assert fields(target) == fields(reference)[2:]
    assert files(target) == files(reference)


@pytest.mark.parametrize("how", SAVES)
def test_a_full_disk_ends_the_job_and_the_last_checkpoint_loads(how, small_disk, flags, whole, tmp_path):
    out = small_disk / "out"
    job = ["-m", "zero_mpi.train", *flags, "--out", str(out), "--steps", "9", *SAVES[how]]
    status, _, errors = run_job(3, job, timeout=30)
    assert status == 1, errors
    assert_one_line(errors, "No space left on device")
    rows = len(fields(out))
    assert rows == 4 if "--async-save" not in SAVES[how] else 4 <= rows <= 6, "step 6 must wait for the save"
    state = status_of(out)
    assert (state["state"], state["reason"] in errors) == ("failed", True)
    assert_goes_on(out, flags, whole, tmp_path / "on")


def test_a_disk_without_room_for_a_checkpoint_is_found_before_the_first_step(mount, flags, tmp_path):
    mount(tmp_path / "disk", "-t", "tmpfs", "-o", "size=100k", "tmpfs")
    for dry in ([], ["--dry-run"]):
        job = ["-m", "zero_mpi.train", *flags, "--out", str(tmp_path / "disk" / "out"), "--steps", "9", *dry]
        status, printed, errors = run_job(3, job, timeout=30)
        assert (status, errors.count("\n")) == (2, 1), printed + errors
        assert f"--out {tmp_path}/disk/out: " in errors
        assert "step  1/9" not in printed
    assert not list((tmp_path / "disk").rglob("metrics.jsonl"))


# After 45 steps rank 0 cannot write files as large as a checkpoint.
SMALL_FILES = """
if (done, rank) == (45, 0):
    self.saving.saver.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000))
"""


def test_what_fails_in_the_background_comes_up_before_the_next_save(flags, tmp_path):
    """All ranks end at one of the next steps instead of training in vain."""
    script, out = train_with(tmp_path / "script.py", SMALL_FILES), tmp_path / "out"
    flags = [*flags, "--out", str(out), "--steps", "121", "--async-save", "--save-every", "40"]
    status, _, errors = run_job(3, [script, *flags], timeout=30)
    assert status == 1, errors
    assert_one_line(errors, "File too large")
    assert 80 <= len(fields(out)) < 120
    assert (out / "latest").readlink() == Path("step-00000040")
    check_digests(open_checkpoint(out / "latest"))


# Before step 4 the run folder is mounted read-only. Files that are already open, the records, stay
# writable.
READ_ONLY = """
if done == 3:
    self.saving.saver.wait()  # for the checkpoint of step 2, if it is saved in the background
    if rank == 0:
        out = str(self.session.out)
        subprocess.run(["mount", "--bind", out, out], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", out], check=True)
    self.session.comm.barrier()
"""


@pytest.mark.parametrize("how", SAVES)
def test_a_folder_that_is_no_longer_writable_is_named(how, mount, flags, whole, tmp_path):
    """Permissions do not stop root, so the folder is mounted read-only."""
    out = tmp_path / "out"
    out.mkdir()
    mount(out, "--bind", str(out))  # skips the test if mounting is refused
    script = train_with(tmp_path / "script.py", READ_ONLY)
    job = [script, *flags, "--out", str(out), "--steps", "9", *SAVES[how]]
    status, _, errors = run_job(3, job, timeout=30)
    assert status == 1, errors
    assert_one_line(errors, "Read-only file system")
    assert_goes_on(out, flags, whole, tmp_path / "on")


# Runs `zero_mpi.train` under a quota that the file system does not report.
QUOTA = """
import shutil
from zero_mpi.train import command

shutil.disk_usage = lambda place: shutil._ntuple_diskusage(1 << 40, 0, 1 << 40)
command.main()
"""


@pytest.mark.parametrize("pages", [0, 2])
def test_a_disk_that_is_full_at_the_start_is_one_line(pages, small_disk, flags, tmp_path):
    """The disk has no free space, or less than the first records need."""
    (tmp_path / "script.py").write_text(QUOTA)
    out, filler = small_disk / "out", small_disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - 4096 * pages))
    job = [str(tmp_path / "script.py"), *flags, "--out", str(out), "--steps", "99", "--save-every", "0"]
    status, _, errors = run_job(3, job, timeout=30)
    assert status == 1, errors
    (line,) = errors.splitlines()
    assert line.startswith("zero_mpi train: error: ")
    assert str(out) in line
    assert "No space left on device" in line
    contents = {path.name: path.read_bytes() for path in out.iterdir()}
    assert contents.keys() <= {"status.json", "config.toml", "metrics.jsonl", "proof.jsonl", "events.jsonl"}
    assert all(contents[name] for name in contents.keys() & {"status.json", "config.toml"}), "an empty file"
    for name in ("metrics.jsonl", "proof.jsonl"):
        assert contents.get(name, b"")[-1:] in (b"", b"\n"), "half a line"
    assert pages == 0 or json.loads(contents["status.json"])["state"] == "failed"


# Runs a command that cannot close a written file; a network file system may report errors only on close.
FAILING = """
import builtins, errno, fcntl, io, os, runpy, sys

name, *sys.argv[:] = sys.argv[1:]

def is_it(path):
    return os.path.basename(str(path)) == name

def fail():
    raise OSError(errno.EIO, os.strerror(errno.EIO))

def close(handle, usual=os.close):
    path, writes = os.readlink(f"/proc/self/fd/{handle}"), fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE
    usual(handle)
    if writes and is_it(path):
        fail()

class Failing(io.FileIO):
    def close(self):
        if not self.closed:
            super().close()
            fail()

def opened(path, mode="r", buffering=-1, *more, usual=io.open, **named):
    if not is_it(path) or not set(mode) & set("wa"):
        return usual(path, mode, buffering, *more, **named)
    raw = Failing(path, mode.replace("b", ""))
    writer = raw if buffering == 0 else io.BufferedWriter(raw)
    return writer if "b" in mode else io.TextIOWrapper(writer)

os.close, io.open, builtins.open = close, opened, opened
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
TRAINED = ["zero_mpi.train", "--out", "out", "--steps", "3", "--data", "text-0-0.txt"]
# Files that are open while a run goes on. Other files are synced before they are closed: test_crash.py and
# test_export.py test that a failed sync is reported.
CLOSED = {"metrics.jsonl": 1, "proof.jsonl": 1, ".lock": 0, "events.jsonl": 0, ".status.json.0": 0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("closed")
    write_text(folder)
    flags = [*KEPT, "--data", str(folder / "text-0-0.txt"), "--steps", "2"]
    train(1, folder / "run", *flags)
    (folder / "failing.py").write_text(FAILING)
    return folder


@pytest.mark.parametrize(("name", "expected"), CLOSED.items())
def test_a_file_that_cannot_be_closed_is_one_line(name, expected, trained, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    start = [sys.executable, "failing.py", name, *TRAINED]
    status, _, errors = run_command(start, timeout=60, cwd=tmp_path)
    errors = re.sub("(?m)^Abort.*\n", "", errors)
    assert (status, "Traceback" in errors) == (expected, False), errors
    if expected:
        assert len(errors.splitlines()) == 1, errors
        assert re.search(rf"{name}.*: Input/output error", errors)
