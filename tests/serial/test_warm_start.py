"""Ranks that are forked from a loaded process (tests/warm_start.py) do what ranks that are started do."""

import signal

import jobs
import pytest
from test_command_bits import SIZES, assert_same_run, needs_mpiexec, write_text

pytestmark = [
    needs_mpiexec,
    pytest.mark.skipif(jobs.is_cold(), reason="ranks are started: ZERO_MPI_TEST_WARM=0, or no MPICH"),
]
ENDS = """
import os, signal, sys, time
from zero_mpi.comm.start_mpi import MPI
sys.stdout.write(f"{{sys.argv[1:]}} {{MPI.COMM_WORLD.size}}\\n")
sys.stdout.flush()
MPI.COMM_WORLD.Barrier()
{}
time.sleep(20)
"""


@pytest.mark.parametrize("operations", [jobs.REFERENCE, jobs.COMPILED])
def test_both_write_the_same_files(operations, tmp_path):
    command = ["-m", "zero_mpi.train", *SIZES, "--data", *write_text(tmp_path), "--steps", "2"]
    for warm in (True, False):
        out = str(tmp_path / str(warm))
        status, _, errors = jobs.run_job(2, [*command, "--out", out], env=operations, warm=warm)
        assert (status, errors) == (0, "")
    assert_same_run(tmp_path / "True", tmp_path / "False")


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("sys.exit(7 if MPI.COMM_WORLD.rank else 0)", 7),
        ("os.kill(os.getpid(), signal.SIGKILL)", signal.SIGKILL),
        ("MPI.COMM_WORLD.Abort(5)", 5),
        ("raise RuntimeError", 1),
    ],
)
def test_a_job_ends_as_its_ranks_do(action, expected, tmp_path):
    (tmp_path / "ends.py").write_text(ENDS.format(action))
    for warm in (True, False):
        status, printed, _ = jobs.run_job(2, ["ends.py", "y z"], warm=warm, timeout=15, cwd=tmp_path)
        assert printed.startswith("['y z'] 2\n")
        assert status in (jobs.status_of_one(expected) if expected == signal.SIGKILL else {expected})
