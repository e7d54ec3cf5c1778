#!/usr/bin/env python3
"""Supervised runs over three hosts that lose something, as data; and such runs at random times.

    python tests/cluster/losses.py --trials 20 --seed 1

makes three hosts for each trial, starts a run over them by `supervise` inside the first, lets something
happen to another one after a step that is drawn, and compares the run that is done with an undisturbed one.
"""

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))
sys.path.insert(0, str(TESTS / "serial"))

from faults import Trial  # noqa: E402
from hosts import Hosts, hosts  # noqa: E402
from jobs import run_command  # noqa: E402
from test_command_bits import assert_same_run  # noqa: E402
from test_faults import flags, read_status, write_tokens  # noqa: E402

SECONDS = 60  # for the next thing to happen, on a busy machine
SUPERVISE = ["--backoff", "0.2", "--probe-timeout", "10"]
TIMEOUT = 12.0  # --timeout: a machine that stands still for some seconds is not to cost a restart


def processes_of(here: Hosts, host: str) -> Iterator[int]:
    """All processes inside a host: those of its namespace of processes."""
    name = os.readlink(f"/proc/{here.process(host)}/ns/pid")
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and os.readlink(entry / "ns" / "pid") == name:
                yield int(entry.name)


def kill_a_rank(here: Hosts, trial: Trial, host: str) -> None:
    """The rank of a host is killed; the host is well."""
    inside = set(processes_of(here, host))
    os.kill(next(process for process in trial.ranks().values() if process in inside), signal.SIGKILL)


def lose(here: Hosts, trial: Trial, host: str) -> None:
    here.lose(host)


def hang(here: Hosts, trial: Trial, host: str) -> None:
    for process in processes_of(here, host):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGSTOP)


def cut(here: Hosts, trial: Trial, host: str) -> None:
    """A host's link is cut; its ranks go on, and end by themselves."""
    here.set_link(host, up=False)


Event = Callable[[Hosts, Trial, str], None]
EVENTS: dict[str, Event] = {"rank": kill_a_rank, "lost": lose, "hung": hang, "cut": cut}
STAYS = ("rank",)  # events after which the host answers


def supervised(here: Hosts, trial: Trial, mpi: str = "mpich") -> None:
    enter, first, *job = here.job(3, 1, [], mpi=mpi)
    place = job.index("--hostfile" if "--hostfile" in job else "-machinefile") + 1
    hostfile, job[place], job[job.index("-n") + 1] = job[place], "{hostfile}", "{ranks}"
    of_hosts = ["--hostfile", hostfile, "--for", mpi, "--probe", f"{here.state / 'ssh'} {{host}} true"]
    start = [enter, first, sys.executable, "-m", "zero_mpi", "supervise", *SUPERVISE, *of_hosts, "--", *job]
    write_tokens(trial.out.parent / "tokens.npy")
    trial.start(start, [*flags(trial.out.parent, TIMEOUT), "--transport", "mpi"])


def restarted(trial: Trial) -> int:
    return (
        trial.errors.count(" on 3 hosts (")
        + trial.errors.count(" on 2 hosts (")
        + trial.errors.count(" on 1 host (")
    )


def assert_done(trial: Trial, unbroken: Path) -> None:
    assert trial.job.wait(2 * SECONDS) == 0, trial.errors
    assert read_status(trial.out)["state"] == "done"
    assert_same_run(trial.out, unbroken)


def undisturbed(folder: Path) -> Path:
    write_tokens(folder / "tokens.npy")
    start = [sys.executable, "-m", "zero_mpi.train", "--out", str(folder / "out"), *flags(folder)]
    status, printed, errors = run_command(start, timeout=90)
    assert (status, errors) == (0, ""), printed
    return folder / "out"


def random_trial(draw: random.Random, unbroken: Path) -> str:
    """One run to which something happens at a moment that is drawn. Returns what, in a line."""
    name, host, step = draw.choice([*EVENTS]), draw.choice(["h2", "h3"]), draw.randrange(1, 55)
    with hosts(3) as here, contextlib.closing(Trial(here.folder)) as trial:
        supervised(here, trial)
        trial.until(lambda: trial.done >= step, f"step {step}", SECONDS)
        EVENTS[name](here, trial, host)
        assert_done(trial, unbroken)
        restarts = restarted(trial)
        left = "" if name in STAYS else f"; left out (no answer): {host}"
        assert restarts >= 1, trial.errors
        assert left in trial.errors, trial.errors
    return f"{name} of {host} after step {step}: {restarts} restart(s), done, the same bytes"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zero_mpi-test-", dir="/var/tmp") as folder:
        unbroken = undisturbed(Path(folder))
        for number in range(options.trials):
            draw = random.Random(options.seed * 1000 + number)
            print(number + 1, random_trial(draw, unbroken), flush=True)


if __name__ == "__main__":
    main()
