"""A rank without progress prints a report and ends the job on all ranks."""

import sys

from jobs import run_command

from zero_mpi.launch.watchdog import STATUS, RankReports, RankState


def test_what_another_job_left_misleads_nobody(tmp_path):
    """The reports that the ranks of a killed job left do not affect the next job."""
    for rank in range(2):
        RankReports(tmp_path, rank, "the job before").sign(
            RankState("step 3", "barrier", "barrier", 2.0, "stacks")
        )
    assert RankReports(tmp_path, 0, "the job before").claim()
    now = RankReports(tmp_path, 1, "this job")
    now.sign(RankState("step 3", "", "allgather of parameters blk.0", 2.0, "stacks"))
    assert now.read().keys() == {1}
    assert now.claim()
    now.clear()
    assert list(tmp_path.iterdir()) == []


ALONE = """
import os, time
from zero_mpi.launch.watchdog import STATUS, Watchdog

def kill(status):
    print("all are to end with", status, flush=True)
    os._exit(status)

watchdog = Watchdog(3, 0.2, kill)
watchdog.beat("the first thing")
time.sleep(60)
"""


def test_before_ranks_know_of_each_other_one_that_stands_still_ends_them_all():
    status, output, errors = run_command([sys.executable, "-c", ALONE], timeout=30)
    assert (status, output) == (STATUS, f"all are to end with {STATUS}\n")
    assert "zero_mpi: rank 3: no progress for 0." in errors
    assert "s: the first thing, in no collective; ending the job" in errors
