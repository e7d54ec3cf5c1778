"""What killed jobs leave in shared memory: known by the kernel's word, removed at the next start.

Jobs have a /dev/shm of their own, which needs the right to mount one. A kill while MPI starts is the one that
leaves something; the driver waits for the library's file to appear, so that no moment is guessed.
"""

import json
import mmap
import os
import subprocess
import sys

import pytest
from jobs import launcher, launcher_kind, run_command
from test_command_bits import needs_mpiexec, write_text
from test_shared_fallback import MOUNT, why_no_mount

from zero_mpi.launch import dev_shm

SMALL = ["--layers", "2", "--dim", "32", "--heads", "2", "--context", "16", "--batch-size", "4"]
SMALL += ["--warmup", "1", "--sample", "0", "--steps"]
DRIVER = """
import json, os, signal, subprocess, sys, time

out, job = sys.argv[1], json.loads(sys.argv[2])
PLACE = "/dev/shm"

def about(process):
    try:
        state, parent = open(f"/proc/{process}/stat").read().rpartition(")")[2].split()[:2]
        return state, int(parent), len(os.listdir(f"/proc/{process}/task"))
    except OSError:
        return "gone", 0, 0

def family(first):
    found, parents = [first], {int(name): about(name)[1] for name in os.listdir("/proc") if name.isdigit()}
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found

def alive(process):
    state, _, threads = about(process)
    return state != "gone" and (state != "Z" or threads > 1)  # its memory goes with its last thread

def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "waited for 60 s"
        time.sleep(0.002)

def kill(number, steps):
    folder, records = f"{out}/{number}", f"{out}/{number}/metrics.jsonl"
    started = subprocess.Popen(
        [*job, "100000", "--out", folder], start_new_session=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
    )
    if steps:
        until(lambda: os.path.exists(records) and os.path.getsize(records))
    else:
        until(lambda: any(name.startswith("mpich_sh") for name in os.listdir(PLACE) if name not in before))
    os.kill(started.pid, signal.SIGSTOP)  # or it would tidy up after its ranks
    killed = family(started.pid)
    for process in killed:
        os.kill(process, signal.SIGKILL)
    started.wait()
    until(lambda: not any(map(alive, killed)))

left = []
for number, steps in enumerate([True, False] * 2):
    before = os.listdir(PLACE)
    kill(number, steps)
    for name in os.listdir(PLACE):
        os.utime(f"{PLACE}/{name}", (1, 1))  # as if it had been a while ago
    left.append([len(os.listdir(PLACE)), len({*os.listdir(PLACE)} & {*before})])
last = subprocess.run([*job, "2", "--out", f"{out}/last"], capture_output=True, text=True)
print(json.dumps({"left": left, "end": os.listdir(PLACE), "said": last.stdout, "status": last.returncode}))
"""


def in_use(path, code):
    """Whether `path` is taken for unused while another process, in other namespaces, runs `code` on it."""
    command = ["unshare", "--fork", "--pid", "--kill-child", sys.executable, "-c", code, path]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"there\n"
        found = dev_shm.is_unused(path)
        child.communicate(b"\n")
    return not found


@pytest.fixture
def segment(tmp_path):
    """A file as libraries make it, on a file system in memory; new, or another test's job would remove it."""
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
    monkeypatch.setattr(dev_shm.os, "geteuid", lambda: os.getuid() + 1)
    dev_shm.sweep(tmp_path)
    assert (tmp_path / "mpich_shm_used").exists(), "another user's"


@needs_mpiexec
@pytest.mark.timeout_seconds(240)
def test_what_is_left_does_not_grow_with_the_kills(tmp_path):
    """Four kills, two of them while MPI starts, which leave something: the next start takes it away."""
    if reason := why_no_mount():
        pytest.skip(f"no private /dev/shm: {reason}")
    if launcher_kind() != "mpich":
        pytest.skip("the driver waits for a file of MPICH")
    data = write_text(tmp_path)
    job = [*launcher(), "-n", "2", sys.executable, "-m", "zero_mpi.train", "--data", *data, *SMALL]
    arguments = [sys.executable, "-c", DRIVER, str(tmp_path), json.dumps(job)]
    command = ["unshare", "-m", "sh", "-c", MOUNT + 'exec "$@"', "200m", *arguments]
    status, said, errors = run_command(command, timeout=230, cwd=tmp_path)
    assert status == 0, errors
    found = json.loads(said)
    assert found["status"] == 0, found
    assert [count for count, _ in found["left"][::2]] == [0] * 2, "nothing stays of a kill during steps"
    assert min(count for count, _ in found["left"][1::2]) >= 1, "something stays of a kill while MPI starts"
    assert [older for _, older in found["left"]] == [0] * 4
    assert found["end"] == []
