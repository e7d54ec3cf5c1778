"""Jobs with a private /dev/shm that is too small for the model or becomes full, and the files left in it.

A shared window whose pages do not fit ends a process by SIGBUS, so a run must detect this beforehand and
use messages, with the same bytes. Each job has a private tmpfs mounted on /dev/shm, which needs the
right to mount (root, as in a container's build).
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import launcher, launcher_kind, run_command
from test_command_bits import assert_same_run, needs_mpiexec, train, write_text

pytestmark = needs_mpiexec
MOUNT = 'mount -t tmpfs -o size="$0" tmpfs /dev/shm || exit 99\n'
# Files that the job leaves are counted after all its processes have ended.
COMMAND = MOUNT + '"$@"; status=$?; sleep 0.3; find /dev/shm -type f -printf "left %s\\n"; exit $status'
MODEL = ["--layers", "2", "--dim", "256", "--heads", "4", "--context", "16", "--batch-size", "4"]
MODEL += ["--steps", "2", "--warmup", "1", "--sample", "0"]  # 1.6 million parameters: 6 MiB, plus slots
PATCH = """
import os, signal, sys, tempfile
from zero_mpi.train import command as train_command
from zero_mpi.comm.shared import memory as window
from zero_mpi.optim.optimizer import ShardedOptimizer

step = ShardedOptimizer.step

def dying(self, *args, **options):
    if self.steps == 1 and self.module.comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *args, **options)

populate = window.populate

def full(memory, own):
    with tempfile.TemporaryFile(dir=window.PLACE, buffering=0) as others:
        try:
            while others.write(bytes(1 << 16)):
                pass
        except OSError:
            return populate(memory, own)

HOW = os.environ["HOW"]
if "race" in HOW:
    window.populate = full  # others take the room after we looked and have made the window
else:
    ShardedOptimizer.step = dying
train_command.main()
"""


def why_no_mount() -> str:
    command = ["unshare", "-m", "sh", "-c", MOUNT, "1m"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stderr.strip() or f"status {done.returncode}" if done.returncode else ""


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> list[str]:
    if reason := why_no_mount():
        pytest.skip(f"no private /dev/shm: {reason}")
    return write_text(tmp_path_factory.mktemp("text"))


def run_with_shm(size: str, ranks: int, out: Path, *flags: str, how: str = "") -> tuple[int, str, int]:
    start = ["-m", "zero_mpi.train"]
    if how:
        script = out.parent / "patched.py"
        script.write_text(PATCH)
        start = [str(script)]
    job = [*launcher(), "-n", str(ranks), sys.executable, *start, "--out", str(out), *flags]
    command, env = ["unshare", "-m", "sh", "-c", COMMAND, size, *job], {"HOW": how, "OMPI_MCA_osc": "^ucx"}
    status, output, _ = run_command(command, timeout=50, env=env, cwd=out.parent, merge=True)
    return status, output, sum(int(size) for size in re.findall(r"^left (\d+)$", output, re.MULTILINE))


@pytest.mark.parametrize("how", ["", "race"])
def test_too_little_shared_memory_is_one_line_and_messages(how, text, tmp_path):
    """Other processes may fill /dev/shm later. The library must have created the window by then, because
    Open MPI checks the space on one rank only, and if the check fails, other ranks wait forever."""
    flags = ["--data", *text, *MODEL]
    size = "100m" if how else "32m" if launcher_kind() == "intel" else "12m"
    status, output, _ = run_with_shm(size, 2, tmp_path / "out", *flags, "--transport", "auto", how=how)
    assert status == 0, output
    lines = [line for line in output.splitlines() if "transport" in line]
    reason = r"\d+.\d MiB of shared memory .*/dev/shm has .* free"
    reason = "/dev/shm is full: .*" if how else reason
    assert len(lines) == 1, output
    assert re.fullmatch(f"transport: mpi, because {reason}", lines[0])
    train(2, tmp_path / "roomy", *flags, "--transport", "shared")
    assert_same_run(tmp_path / "out", tmp_path / "roomy")


def test_nothing_is_left_after_a_run(text, tmp_path):
    status, output, left = run_with_shm("200m", 3, tmp_path / "out", "--data", *text, *MODEL)
    assert status == 0, output
    assert "transport: shared" in output
    assert left == 0


def test_a_failure_leaves_no_window(text, tmp_path):
    """SIGKILL may leave segments of the MPI library, with any transport; the package's have no names."""
    left = {}
    for transport in ("mpi", "shared"):
        flags = ["--data", *text, *MODEL, "--transport", transport]
        status, output, left[transport] = run_with_shm("200m", 3, tmp_path / transport, *flags, how="kill")
        assert status != 0, output
        assert f"transport: {transport}" in output
    assert left["shared"] <= left["mpi"] + (1 << 20), left
