"""A private Slurm on this machine for a test, and jobs in it.

    with slurm(cpus=8) as here:
        job = here.submit(["--ntasks-per-node=4"], "examples/slurm/one_node.sbatch", ["--out", out])
        here.signal(job, "USR1")
        here.wait(job, "PENDING")

`tools/cluster/slurm_up.sh` creates it with one node. `slurm_over` creates one with a node for each given
host. Slurm ends when the block ends or this process is killed: a separate shell waits for the end of its
standard input and ends Slurm.
"""

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import which

import jobs
from hosts import Hosts
from keeper import kept

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = "apt-get install -y --no-install-recommends slurm-wlm munge"


@dataclass(frozen=True)
class Slurm:
    state: Path
    enter: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return self.state / "runs"

    def run(
        self, *command: str, env: Mapping[str, str] | None = None, timeout: float = 60
    ) -> tuple[int, str, str]:
        """Run a Slurm command; return (exit status, stdout, stderr)."""
        environ = {"SLURM_CONF": f"{self.state}/slurm.conf"} | dict(env or {})
        return jobs.run_command([*self.enter, *command], timeout=timeout, env=environ, cwd=ROOT)

    def command(self, *command: str, env: Mapping[str, str] | None = None) -> str:
        status, printed, errors = self.run(*command, env=env)
        assert status == 0, f"{' '.join(command)}: status {status}\n{printed}\n{errors}"
        return printed

    def why_no_launch(self, launch: str) -> str:
        status, _, errors = self.run(*launch.split(), "-n", "1", "true")
        return f"{launch}: {errors.strip()}" if status else ""

    def submit(
        self,
        options: Sequence[str],
        script: str,
        flags: Sequence[str] = (),
        *,
        python: str = sys.executable,
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Submit a script as a user would, from the project's folder with `python`'s environment active.

        Return the job's number. `log(number)` returns its output.
        """
        path = f"{Path(python).parent}:{os.environ['PATH']}"
        start = ["sbatch", "--parsable", f"--output={self.folder}/job-%j.log", *options, script, *flags]
        environ = {"PATH": path, "SETTLE": "0"}  # jobs are signalled after their ranks have started
        return self.command(*start, env={**environ, **(env or {})}).strip()

    def log(self, job: str) -> str:
        path = self.folder / f"job-{job}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def facts(self, job: str) -> dict[str, str]:
        first = self.command("scontrol", "--oneliner", "show", "job", job).splitlines()[0]
        pairs = (word.partition("=") for word in first.split() if "=" in word)
        return {name: value for name, _, value in pairs}

    def signal(self, job: str, name: str) -> None:
        self.command("scancel", "--batch", f"--signal={name}", job)

    def signal_ranks(self, job: str, name: str) -> None:
        """Send a signal directly to the ranks that a job's srun started, not to the script.

        `scancel --batch` on an array would wait for its pending tasks.
        """
        self.command("scancel", f"--signal={name}", f"{self.facts(job)['JobId']}.0")

    def ranks(self, job: str) -> list[int]:
        _, *lines = self.command("scontrol", "listpids", f"{self.facts(job)['JobId']}.0").splitlines()
        columns = [line.split() for line in lines]  # PID JOBID STEPID LOCALID GLOBALID
        ranks = {int(line[4]): int(line[0]) for line in columns if line[4].isdigit()}
        return [ranks[number] for number in sorted(ranks)]

    def wait(self, job: str, state: str) -> None:
        self.until(lambda: self.facts(job)["JobState"] == state, job, f"{job} is not {state}")

    def until(self, holds: Callable[[], bool], job: str, message: str, seconds: float = 150) -> None:
        """Wait until a condition holds; after `seconds` the test fails with the job's log."""
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                raise AssertionError(f"{message} after {seconds:g} s: {self.facts(job)}\n{self.log(job)}")
            time.sleep(0.05)

    def cancel_all(self) -> None:
        self.command("scancel", "--user=root")
        deadline = time.monotonic() + 30
        while self.command("squeue", "--noheader").strip():
            assert time.monotonic() < deadline, self.command("squeue")
            time.sleep(0.2)


@contextlib.contextmanager
def slurm(cpus: int = 8) -> Iterator[Slurm]:
    """Start a Slurm of one node with `cpus` processors. Raise RuntimeError if the start fails."""
    if reason := why_no_slurm():
        raise RuntimeError(reason)
    with kept("slurm", str(cpus), env=jobs.clean_environment()) as state:
        yield Slurm(state)


@contextlib.contextmanager
def slurm_over(here: Hosts, cpus: int = 2) -> Iterator[Slurm]:
    """Start a Slurm whose nodes are hosts with `cpus` processors each. Raise RuntimeError on failure."""
    if reason := why_no_slurm():
        raise RuntimeError(reason)
    environ = jobs.clean_environment() | {"HOSTS_STATE": str(here.state)}
    with kept("slurm", str(cpus), env=environ) as state:
        yield Slurm(state, tuple(here.on(here.names[0])))


@functools.cache
def why_no_slurm() -> str:
    if os.geteuid() != 0:
        return "a Slurm needs root"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    needed = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
    missing = [name for name in needed if which(name, path=path) is None]
    return f"a Slurm needs {', '.join(missing)}: {PACKAGES}" if missing else ""
