"""Hosts of a run: finds and probes them, chooses the hosts of a start, and fills in the launch command.

A host answers if its probe command ends with status 0 in time. Before each start except the first, all hosts
except this machine are probed, up to AT_ONCE at the same time. The last `spare` hosts of the
list are only used if earlier hosts do not answer.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from zero_mpi.commands.hostfile import LINES, HostEntry, hosts_in, read_hosts
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import shown

AT_ONCE = 64  # maximum number of hosts that are probed at the same time
LOOK = 0.05  # seconds between checks of running probes
SECONDS = 30.0  # seconds within which Slurm must list its nodes
HERE = "{host}"
BY_SSH = "ssh -o BatchMode=yes -o StrictHostKeyChecking=accept-new {host} true"
BY_SRUN = "srun --overlap --nodes=1 --ntasks=1 --nodelist={host} true"
PLACEHOLDERS = "{hostfile}", "{hosts}", "{nodes}", "{ranks}"
DEFAULT_OUT = "runs/default"  # default --out of train


@dataclass(frozen=True)
class HostPool:
    """Hosts of a run, in the order of the list, and the command that probes a host."""

    hosts: tuple[HostEntry, ...]
    probe: tuple[str, ...]  # words of the command; HERE stands for the host name
    timeout: float = 15.0  # seconds after which a probe has failed
    spare: int = 0  # number of hosts at the end of the list that are spares

    def choose(self, silent: Sequence[str] = ()) -> tuple[HostEntry, ...]:
        count = len(self.hosts) - self.spare
        return tuple(host for host in self.hosts if host.name not in silent)[:count]

    def silent(self) -> list[str]:
        own_names = names_of_this_machine([host.name for host in self.hosts])
        names = [host.name for host in self.hosts if host.name not in own_names]
        silent = list[str]()
        for begin in range(0, len(names), AT_ONCE):
            probes = {name: self._ask(name) for name in names[begin : begin + AT_ONCE]}
            deadline = time.monotonic() + self.timeout
            while time.monotonic() < deadline and any(job and job.poll() is None for job in probes.values()):
                time.sleep(LOOK)
            for name, job in probes.items():
                if job and job.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(job.pid, signal.SIGKILL)
                if job is None or job.wait() != 0:
                    silent.append(name)
        return silent

    def _ask(self, name: str) -> subprocess.Popen[bytes] | None:
        """Start the probe of a host in a new process group and return it; None if its program is missing."""
        words, null = [word.replace(HERE, name) for word in self.probe], subprocess.DEVNULL
        try:
            return subprocess.Popen(words, stdin=null, stdout=null, stderr=null, start_new_session=True)
        except OSError:
            return None


def names_of_this_machine(names: Sequence[str]) -> set[str]:
    """Return the names of this machine; one of `names` may add a domain to its name."""
    own = platform.node()
    full = {name for name in names if name.startswith(f"{own}.")}
    return {own, own.partition(".")[0], "localhost", "127.0.0.1", *(full if len(full) == 1 else ())}


def find_pool(hostfile: str, probe: str, environ: Mapping[str, str] = os.environ) -> HostPool | None:
    """Return the hosts of a file or batch job; None without either. Raise UsageError if they are invalid."""
    nodes = environ.get("SLURM_JOB_NODELIST", "")
    file = hostfile or ("" if nodes else environ.get("PBS_NODEFILE", ""))
    if not (file or nodes):
        return None
    hosts = hosts_in(file) if file else slurm_hosts(environ)
    text = probe or (BY_SSH if file else BY_SRUN)
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--probe {shown(text)}: not a command: {error}") from None
    if not any(HERE in word for word in words):
        raise UsageError(f"--probe {shown(text)}: expected {HERE} in place of the host name")
    return HostPool(tuple(hosts), words)


def slurm_hosts(environ: Mapping[str, str]) -> list[HostEntry]:
    """Return the nodes of a Slurm job with their numbers of ranks. Raise UsageError if Slurm fails."""
    question = ["scontrol", "show", "hostnames", environ["SLURM_JOB_NODELIST"]]
    try:
        answer = subprocess.run(question, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS)
        names = read_hosts(answer.stdout.decode().splitlines(), "scontrol show hostnames")
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError) as error:
        raise UsageError(f"scontrol cannot list the nodes of this job ({error}); add --hostfile") from None
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_TASKS_PER_NODE", ""))
    counts = [int(ranks) for ranks, times in groups for _ in range(int(times or 1))]
    counts += [counts[-1] if counts else 1] * (len(names) - len(counts))
    return [HostEntry(host.name, max(1, count)) for host, count in zip(names, counts, strict=False)]


@dataclass(frozen=True)
class Template:
    """Launch command with placeholders. `form` names the launcher that reads the hostfile."""

    words: tuple[str, ...]
    form: str

    @property
    def takes_hosts(self) -> bool:
        return any(name in word for word in self.words for name in PLACEHOLDERS)

    def fill(self, hosts: Sequence[HostEntry], folder: Path) -> list[str]:
        """Return the launch command for these hosts. Write their hostfile into `folder`."""
        path = folder / "hosts"
        path.write_text("".join(f"{LINES[self.form](host)}\n" for host in hosts))
        names = ",".join(host.name for host in hosts)
        values = str(path), names, str(len(hosts)), str(sum(host.slots for host in hosts))
        words = list(self.words)
        for placeholder, value in zip(PLACEHOLDERS, values, strict=True):
            words = [word.replace(placeholder, value) for word in words]
        return words

    def resuming(self) -> Template:
        """Return the command with `--resume auto`, so that the run resumes from its newest checkpoint."""
        words, is_given = list(self.words), False
        for number, word in enumerate(words):
            if word == "--resume" and number + 1 < len(words):
                words[number + 1], is_given = "auto", True
            elif word.startswith("--resume="):
                words[number], is_given = "--resume=auto", True
        if self._is_training() and not is_given:
            words += ["--resume", "auto"]
        return Template(tuple(words), self.form)

    def out(self) -> Path | None:
        """Return the run folder, or None if the command does not train. Raise UsageError if it is unknown."""
        folders = [
            following if word == "--out" else word.removeprefix("--out=")
            for word, following in pairwise((*self.words, ""))
            if word.startswith("--out=") or (word == "--out" and following)
        ]
        if folders:
            return Path(folders[-1])
        if any(word.partition("=")[0] == "--config" for word in self.words):
            raise UsageError("--run: expected the run folder, because the command has --config and no --out")
        return Path(DEFAULT_OUT) if self._is_training() else None

    def _is_training(self) -> bool:
        names = [Path(word).name for word in self.words]
        commands = ("zero-mpi", "train"), ("zero_mpi", "train"), ("-mzero_mpi", "train")
        return bool({"zero_mpi.train", "-mzero_mpi.train"} & {*names} or {*commands} & {*pairwise(names)})
