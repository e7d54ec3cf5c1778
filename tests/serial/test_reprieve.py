"""A launcher that would kill ranks too soon is paused while they save, and continues afterwards."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# The launcher's state stays R while it has a pending signal but no core to run on.
STATE = """
import os, time
def state():
    for _ in range(400):
        found = open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[0]
        if found != "R":
            break
        time.sleep(0.05)
    return found
"""

RANK = """
import os, signal, sys
from zero_mpi.launch import ending
ending.HOLD, ending.LATER = 20.0, 0.1
ending.hold_launcher()
print("launcher", state(), flush=True)
if sys.argv[1] == "saves":
    ending.release_launcher()
else:
    os.kill(os.getpid(), signal.SIGKILL)
"""

LEFT = """
from zero_mpi.launch import ending
ending.hold_launcher()
begun, states = time.monotonic(), [state()]
open("held", "w").close()
while states[-1] == "T" and time.monotonic() - begun < 20:
    time.sleep(0.05)
    states.append(state())
print("launcher", states[0], states[-1], flush=True)
"""


def under_launcher(tmp_path, command, **environ):
    """Run a command under a shell with the name of Open MPI's launcher; return the printed lines."""
    shell = Path(shutil.copy(os.path.realpath("/bin/sh"), tmp_path / "prterun"))
    words = [shell, "-c", f"{command}; echo went on"]
    env = {**os.environ, "OMPI_COMM_WORLD_RANK": "0", **environ}
    process = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=30)
    return process.stdout.splitlines()


@pytest.mark.parametrize("end", ["saves", "is killed"])
def test_the_launcher_goes_on_when_its_rank_has_saved_or_is_gone(tmp_path, end):
    lines = under_launcher(tmp_path, f"{sys.executable} -c '{STATE}{RANK}' '{end}'")
    assert lines[-2:] == ["launcher T", "went on"], lines


def test_the_launcher_goes_on_when_another_rank_has_ended(tmp_path):
    other = "while test ! -e held; do sleep 0.1; done"  # a rank that ends while the launcher is stopped
    job = f"({other}) & {sys.executable} -c '{STATE}{LEFT}'"
    lines = under_launcher(tmp_path, job, OMPI_COMM_WORLD_LOCAL_SIZE="2")
    assert lines == ["launcher T S", "went on"]


def test_the_launcher_does_its_work_where_a_rank_has_ended_before(tmp_path):
    lines = under_launcher(tmp_path, f"{sys.executable} -c '{STATE}{LEFT}'", OMPI_COMM_WORLD_LOCAL_SIZE="2")
    assert lines == ["launcher S S", "went on"]


def test_other_launchers_are_left_alone(tmp_path):
    process = subprocess.run(
        [sys.executable, "-c", STATE + RANK, "saves"], capture_output=True, text=True, timeout=30
    )
    assert process.stdout == "launcher S\n", process
