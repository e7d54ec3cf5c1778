"""Tests of files that killed jobs left in shared memory: only files that no process has open are removed.

`test_kills.py` kills jobs in a private /dev/shm and counts the remaining files.
"""

import mmap
import os
import subprocess
import sys

import pytest
from test_shared_fallback import why_no_mount

from zero_mpi.launch import dev_shm


def in_use(path, code):
    """Return whether `path` counts as used while a process in other namespaces runs `code` on it."""
    command = ["unshare", "--fork", "--pid", "--kill-child", sys.executable, "-c", code, path]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"there\n"
        unused = dev_shm.is_unused(path)
        child.communicate(b"\n")
    return not unused


@pytest.fixture
def segment(tmp_path):
    """Shared-memory file named like an MPI library's; it is new, because other jobs remove old files."""
    path = dev_shm.PLACE / f"mpich_shm_test{os.getpid()}"
    path.write_bytes(bytes(5000))
    yield path
    path.unlink(missing_ok=True)


def test_the_kernel_knows_who_holds_a_file_in_any_container(segment):
    if reason := why_no_mount():
        pytest.skip(f"no namespaces: {reason}")
    start = "import mmap, os, sys; fd = os.open(sys.argv[1], os.{}); {}; print('there', flush=True); input()"
    only_mapped = "m = mmap.mmap(fd, 4096, prot=mmap.PROT_READ); os.close(fd)"
    assert in_use(segment, start.format("O_RDWR", only_mapped))
    assert in_use(segment, start.format("O_RDONLY", "None"))
    assert dev_shm.is_unused(segment)


def test_only_what_is_old_ours_and_held_by_nobody_goes(tmp_path, monkeypatch):
    for name in ("mpich_shm_old", "mpich_shm_used", "mpich_shm_new", "other", "sm_segment.host.0.1.0"):
        (tmp_path / name).write_bytes(b"x" * 5000)
        if "new" not in name:
            os.utime(tmp_path / name, (1, 1))
    (tmp_path / "mpich_shm_link").symlink_to("mpich_shm_old")
    with open(tmp_path / "mpich_shm_used", "r+b") as file, mmap.mmap(file.fileno(), 0):
        dev_shm.sweep(tmp_path)
    stay = {path.name for path in tmp_path.iterdir()}
    assert stay == {"mpich_shm_used", "mpich_shm_new", "other", "mpich_shm_link"}
    (tmp_path / "mpich_shm_other").write_bytes(b"x")
    os.utime(tmp_path / "mpich_shm_other", (1, 1))
    monkeypatch.setattr(dev_shm.os, "geteuid", lambda: os.getuid() + 1)
    dev_shm.sweep(tmp_path)
    assert (tmp_path / "mpich_shm_other").exists()
