"""The harness itself: one rank's fault is one report, a hang ends, and no verdict is not a pass."""

import shutil
import sys
import time
from pathlib import Path

from jobs import run_command, run_job
from test_command_bits import needs_mpiexec

TESTS = Path(__file__).resolve().parent.parent
PYTEST = ["-m", "pytest", "-q", "--color=no", "--with-mpi", "-p", "no:cacheprovider"]

FAULTY = """
import os
import time

import pytest
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
FAULT = os.environ.get("FAULT") if WORLD.rank == 1 else None


@pytest.fixture
def frail():
    yield
    assert FAULT != "teardown"


def test_fault(frail):
    assert FAULT not in ("call", "hang")
    if os.environ.get("FAULT") == "hang":
        WORLD.Barrier()


def test_after():
    assert WORLD.allreduce(1) == WORLD.size
"""

WORLD_TESTS = """
import pytest
from mpi4py import MPI

WORLD = MPI.COMM_WORLD


@pytest.mark.world(2)
def test_only_two():
    assert WORLD.size == 2


@pytest.mark.world(1, 4)
def test_not_two():
    assert WORLD.size != 2


@pytest.mark.mpi
def test_folder(ranks_folder):
    (ranks_folder / str(WORLD.rank)).touch()
    WORLD.Barrier()
    assert sorted(path.name for path in ranks_folder.iterdir()) == [str(rank) for rank in range(WORLD.size)]
"""


def make_suite(folder: Path, parallel: str, serial: str = "def test_serial():\n    pass\n") -> None:
    for name, text in ("mpi", parallel), ("serial", serial):
        (folder / "tests" / name).mkdir(parents=True)
        (folder / "tests" / name / f"test_{name}_suite.py").write_text(text)
    for name in ("conftest.py", "jobs.py", "run_sizes.py", "pairs.py"):
        shutil.copy(TESTS / name, folder / "tests")
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -ra\nfilterwarnings = error\ntestpaths = tests\n")


@needs_mpiexec
def test_hang_ends_with_stacks_and_status_86(tmp_path):
    make_suite(tmp_path, FAULTY)
    start = time.monotonic()
    env = {"FAULT": "hang", "ZERO_MPI_TEST_TIMEOUT": "2"}
    status, _, errors = run_job(2, PYTEST, cwd=tmp_path, timeout=30, env=env)
    assert status == 86, errors
    assert time.monotonic() - start < 15
    assert "[rank 1] FAILED tests/mpi/test_mpi_suite.py::test_fault (call)" in errors
    assert "not done after 2 s" in errors
    assert "in test_fault" in errors  # the stack names the line that waits


@needs_mpiexec
def test_run_sizes_ends_with_one_closing_line(tmp_path):
    make_suite(tmp_path, WORLD_TESTS)
    command = [sys.executable, "tests/run_sizes.py", "-n", "1,2", "tests/serial", "tests/mpi"]
    status, output, _ = run_command(command, cwd=tmp_path, timeout=60)
    assert (status, output.splitlines()[-1]) == (0, "5 passed, 0 failed, 0 skipped"), output
    more = tmp_path / "tests" / "mpi" / "test_more.py"
    more.write_text("import os\n\n\ndef test_dies():\n    os._exit(0)\n")
    status, output, _ = run_command([*command, "--", "-k", "dies or serial"], cwd=tmp_path, timeout=60)
    assert (status, output.splitlines()[-1]) == (1, "1 passed, 2 failed, 0 skipped"), output
