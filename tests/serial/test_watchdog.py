"""What a rank says of itself when it stands still, and what is made of what all ranks say."""

import os
import sys
import threading
import time

import pytest
from jobs import run_command

from zero_mpi.comm.meter import Meter, collective
from zero_mpi.launch.watchdog import (
    FOLDER,
    STATUS,
    RankReports,
    RankState,
    Watchdog,
)


def waiting(what, seconds=2.0, doing="step 3"):
    return RankState(doing, what, "barrier", seconds, f"stacks in {what}")


def elsewhere(seconds=2.0):
    return RankState("step 3", "", "allgather of parameters blk.0", seconds, "stacks of the loader")


# what a meter leaves behind


def test_a_meter_tells_what_is_waited_for_and_since_when():
    meter = Meter()
    assert not meter.waits
    before = time.perf_counter()
    with meter.waiting("allgather", "parameters blk.1"):
        assert meter.waits
        assert collective(meter.what) == "allgather of parameters blk.1"
        assert before <= meter.changed <= time.perf_counter()
        with meter.waiting("barrier"):  # a wait within the wait
            assert collective(meter.what) == "allgather of parameters blk.1"
        assert meter.waits
        entered = meter.changed
        time.sleep(0.02)
    assert not meter.waits
    assert meter.changed - entered >= 0.02
    assert meter.wait_seconds == pytest.approx(meter.changed - entered)
    assert collective(meter.what) == "allgather of parameters blk.1", "the last one"


# the roll call


def test_ranks_find_each_other_and_leave_nothing_behind(tmp_path):
    calls = [RankReports(tmp_path, rank, "a job") for rank in range(3)]
    assert not any(call.is_on() for call in calls)
    calls[0].sign(waiting("barrier"))
    assert all(call.is_on() for call in calls)
    calls[2].sign(elsewhere())
    assert calls[0].read().keys() == {0, 2}
    assert calls[0].read()[0].waits == "barrier"
    calls[0].leave()
    assert calls[2].read().keys() == {2}
    calls[2].leave()
    assert list(tmp_path.iterdir()) == []


def test_what_another_job_left_misleads_nobody(tmp_path):
    """It was killed while it stood still: its ranks have signed and one of them was to speak."""
    for rank in range(2):
        RankReports(tmp_path, rank, "the job before").sign(waiting("barrier"))
    assert RankReports(tmp_path, 0, "the job before").claim()
    now = RankReports(tmp_path, 1, "this job")
    now.sign(elsewhere())
    assert now.read().keys() == {1}
    assert now.claim()
    now.clear()
    assert list(tmp_path.iterdir()) == []


def test_ages_are_corrected_by_the_clock_of_the_file_system(tmp_path):
    early, late = (RankReports(tmp_path, rank, "a job") for rank in range(2))
    early.sign(waiting("barrier", seconds=1.0))
    late.sign(waiting("barrier", seconds=1.5))
    stamp = (tmp_path / FOLDER / late._file.name).stat().st_mtime
    os.utime(tmp_path / FOLDER / early._file.name, (stamp - 60, stamp - 60))
    found = late.read()
    assert found[0].seconds == pytest.approx(61.0)
    assert found[1].seconds == pytest.approx(1.5)


def test_a_file_that_is_half_written_is_no_sign(tmp_path):
    call = RankReports(tmp_path, 0, "a job")
    call.sign(waiting("barrier"))
    other = tmp_path / FOLDER / call._file.name.replace("00000", "00001")
    other.write_text('{"doing": "st')
    assert call.read().keys() == {0}


# what is said


def test_a_watchdog_that_is_stopped_ends_nothing():
    """Its threads go; one that went on would end this very process."""
    watchdog = Watchdog(0, 0.2, os._exit)
    watchdog.stop()
    time.sleep(0.7)
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"zero_mpi watchdog", "zero_mpi last resort"}


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
    """Not itself alone: what becomes of the others then depends on the launcher."""
    status, said, errors = run_command([sys.executable, "-c", ALONE], timeout=30)
    assert (status, said) == (STATUS, f"all are to end with {STATUS}\n")
    assert "zero_mpi: rank 3: no progress for 0." in errors
    assert "s: the first thing, in no collective; ending the job" in errors
