"""A launcher that would kill too soon is stopped while ranks save, and goes on whatever becomes of them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import os, signal, sys
from zero_mpi.launch import open_mpi_reprieve as reprieve
reprieve.LIMIT, reprieve.LATER = 0.2, 0.1
reprieve.hold()
stat = open(f"/proc/{os.getppid()}/stat").read()
print("launcher", stat.rpartition(")")[2].split()[0], flush=True)
if sys.argv[1] == "saves":
    reprieve.release()
else:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["saves", "is killed"])
def test_the_launcher_goes_on_when_its_rank_has_saved_or_is_gone(tmp_path, end):
    shell = Path(shutil.copy(os.path.realpath("/bin/sh"), tmp_path / "prterun"))
    command = f"{sys.executable} -c '{RANK}' '{end}'; echo went on"
    told = subprocess.run(
        [shell, "-c", command],
        env={**os.environ, "OMPI_COMM_WORLD_RANK": "0"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert told.stdout.splitlines()[-2:] == ["launcher T", "went on"], told


def test_other_launchers_are_left_alone(tmp_path):
    told = subprocess.run([sys.executable, "-c", RANK, "saves"], capture_output=True, text=True, timeout=30)
    assert told.stdout == "launcher S\n", told
