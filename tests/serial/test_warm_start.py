"""Ranks that are forked from a loaded process (tests/warm_start.py) do what ranks that are started do."""

import jobs
import pytest
from test_command_bits import SIZES, assert_same_run, needs_mpiexec, write_text

pytestmark = [
    needs_mpiexec,
    pytest.mark.skipif(jobs.is_cold(), reason="ranks are started: ZERO_MPI_TEST_WARM=0, or no MPICH"),
]


@pytest.mark.parametrize("operations", [jobs.REFERENCE, jobs.COMPILED])
def test_both_write_the_same_files(operations, tmp_path):
    command = ["-m", "zero_mpi.train", *SIZES, "--data", *write_text(tmp_path), "--steps", "2"]
    for warm in (True, False):
        out = str(tmp_path / str(warm))
        status, _, errors = jobs.run_job(2, [*command, "--out", out], env=operations, warm=warm)
        assert (status, errors) == (0, "")
    assert_same_run(tmp_path / "True", tmp_path / "False")
