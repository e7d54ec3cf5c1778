"""Two jobs on two hosts share a run folder: one completes, the other names that job and its host.

`locks`: the hosts are containers of one machine, so system locks work. `none`: the file system has no
locks and each host counts as another machine, so only renewed records show that a job runs.
"""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts import installed, why_no_hosts
from jobs import clean_environment, end, status_of, until
from patched import train_with
from test_command_bits import fields, write_text
from test_resume import wait_for_lines
from test_two_jobs import SMALL, WAITING, assert_refused

pytestmark = [
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts()),
    pytest.mark.timeout_seconds(120),
]
NO_LOCKS = """
from pathlib import Path
from zero_mpi.launch import folder_lock as lock
lock.lock, lock.BOOT, lock.PATIENCE = lambda handle: None, Path("/nowhere"), 6.0
"""
DELAYS = [0.0, random.Random(7).random() * 5]
Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture(params=["locks", "none"])
def start(request, four_hosts, common_path) -> Iterator[Start]:
    """Return a function that starts a job of two ranks on a host; the jobs end with the test."""
    started, setup = list[subprocess.Popen[str]](), NO_LOCKS if request.param == "none" else ""
    script = train_with(common_path / "job.py", WAITING, setup=setup)
    flags = [*SMALL, "--data", *write_text(common_path), "--out", str(common_path / "out")]
    python, launcher = installed("mpich")

    def run(host: str) -> subprocess.Popen[str]:
        command = four_hosts.on(host, launcher, "-n", "2", python, script, *flags)
        process = subprocess.Popen(
            command, cwd=common_path, env=clean_environment(), text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        return process

    yield run
    (common_path / "go").touch()
    for process in started:
        end(process)


def outcome(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    printed, errors = process.communicate(timeout=60)
    return process.returncode, printed, errors


@pytest.mark.parametrize("number", range(len(DELAYS)))
def test_of_two_jobs_on_two_hosts_one_runs(number, start, common_path):
    out, jobs = common_path / "out", [start("h1")]
    time.sleep(DELAYS[number])
    jobs.append(start("h2"))
    until(lambda: any(job.poll() is not None for job in jobs), "the refusal of a job")
    (common_path / "go").touch()
    done = {host: outcome(job) for host, job in zip(("h1", "h2"), jobs, strict=True)}
    loser, winner = sorted(done, key=lambda host: -done[host][0])
    assert (done[winner][0], done[winner][2]) == (0, ""), done
    record = status_of(out)
    assert (record["state"], record["host"]) == ("done", winner)
    assert_refused(done[loser], out, record["pid"])
    assert f" on {winner}, since " in done[loser][2]
    assert [step for step, *_ in fields(out)] == [str(step) for step in range(1, 9)]
    assert not list(out.glob(".*"))


def test_a_job_takes_over_from_a_killed_one_on_another_host(start, common_path):
    out, first = common_path / "out", start("h1")
    wait_for_lines(out / "metrics.jsonl", 3, first, seconds=60)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    kill_ranks(common_path / "job.py")
    (common_path / "go").touch()
    status, printed, errors = outcome(start("h2"))
    assert (status, errors) == (0, ""), printed
    assert "resuming from" in printed
    assert [step for step, *_ in fields(out)] == [str(step) for step in range(1, 9)]


def kill_ranks(script: Path) -> None:
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and str(script) in (entry / "cmdline").read_text().split("\0"):
                os.kill(int(entry.name), signal.SIGKILL)
        except (OSError, ValueError):
            continue
