"""The hosts of a run: where they are named, which of them answer, and which of these a start may use.

A host answers if a command that goes there ends with status 0 in time; all are asked at once, before each
start but the first. The host that the question comes from is not asked. The last `spare` of the list are not
used while those before them answer.
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

from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import read_file as read_whole
from zero_mpi.hostfile.host_entries import LINES, MOST_BYTES, HostEntry, read_file, read_hosts
from zero_mpi.supervise.launch_line import SRUN, LaunchLine

PLAIN = "plain"  # a name a line: Open MPI takes a name that comes once for all cores of the host
LISTED = "listed"  # in no file: names on the line of the launcher
AT_ONCE = 64  # hosts that are asked at the same time
LOOK = 0.05  # seconds between looks at those that are asked
SECONDS = 30.0  # for Slurm to name its nodes
HERE = "{host}"
OPEN_MPI = (b"Open MPI", b"OpenRTE", b"PRRTE")  # in what its launchers say of themselves
BY_SSH = "ssh -o BatchMode=yes -o StrictHostKeyChecking=accept-new {host} true"
BY_SRUN = "srun --overlap --nodes=1 --ntasks=1 --nodelist={host} true"


@dataclass(frozen=True)
class HostPool:
    """Hosts in their order, and the form in which the launcher reads them.

    probe     the words of a command, with HERE for a host's name; timeout: seconds that it may take
    spare     how many of the last are kept back
    is_given  whether the command goes to all of them by itself
    """

    hosts: tuple[HostEntry, ...]
    form: str
    probe: tuple[str, ...]
    timeout: float = 15.0
    spare: int = 0
    is_given: bool = True

    @property
    def wanted(self) -> int:
        """How many hosts a start takes where all answer."""
        return len(self.hosts) - self.spare

    def choose(self, silent: Sequence[str] = ()) -> tuple[HostEntry, ...]:
        """The first that are not silent, as many as are wanted."""
        return tuple(host for host in self.hosts if host.name not in silent)[: self.wanted]

    def silent(self) -> list[str]:
        """The names of the hosts that do not answer."""
        asked = [host.name for host in self.hosts if host.name not in own_names()]
        parts = (asked[begin : begin + AT_ONCE] for begin in range(0, len(asked), AT_ONCE))
        return [name for part in parts for name in self._ask(part)]

    def _ask(self, names: Sequence[str]) -> list[str]:
        """Those of a few hosts that do not answer."""
        asking = {name: start_quietly([word.replace(HERE, name) for word in self.probe]) for name in names}
        until = time.monotonic() + self.timeout
        while time.monotonic() < until and any(one and one.poll() is None for one in asking.values()):
            time.sleep(LOOK)
        for one in asking.values():
            if one and one.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(one.pid, signal.SIGKILL)
                one.wait()
        return [name for name, one in asking.items() if one is None or one.returncode != 0]

    def lines(self, hosts: Sequence[HostEntry]) -> str:
        """The text of a hostfile."""
        if self.form == PLAIN:
            return "".join(f"{host.name}\n" * host.slots for host in hosts)
        return "".join(f"{LINES[self.form](host)}\n" for host in hosts)


def start_quietly(words: Sequence[str]) -> subprocess.Popen[bytes] | None:
    """A process in a group of its own, which says nothing; None where there is no such program."""
    quiet = subprocess.DEVNULL
    try:
        return subprocess.Popen(words, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
    except OSError:
        return None


def own_names() -> set[str]:
    """What this host is called."""
    name = platform.node()
    return {name, name.partition(".")[0], "localhost", "127.0.0.1"}


def ranks_of(line: LaunchLine, pool: HostPool, hosts: Sequence[HostEntry]) -> int:
    """How many ranks go to some hosts of a pool: as many on each as the command has where all answer."""
    asked, each = line.ranks(), line.per_host()
    if each is None and asked is not None and asked > sum(host.slots for host in pool.hosts):
        each = -(-asked // pool.wanted)
    room = sum(each or host.slots for host in hosts)
    return room if asked is None else min(asked, room)


# ------------------------------------------------------------------------------------- where they are named


def find_pool(
    line: LaunchLine, hostfile: str, probe: str, environ: Mapping[str, str] = os.environ
) -> HostPool | None:
    """The hosts of a file, of the command, or of the batch job; None where none are named, or can change."""
    path = hostfile or line.hostfile()
    if line.placed() or not (path or line.launcher):
        return None
    if path:
        is_given = path == line.hostfile()
        form = form_of(path) if is_given else form_for(line)
        return HostPool(tuple(read_file(path)), form, probe_words(probe, line), is_given=is_given)
    if line.hosts() and line.launcher != SRUN:
        listed = read_hosts(line.hosts().split(","), "the hosts of the command")
        return HostPool(tuple(listed), LISTED, probe_words(probe, line))
    if environ.get("SLURM_JOB_NODELIST"):
        hosts = slurm_hosts(environ, line.hosts() if line.launcher == SRUN else "")
        spare = max(0, len(hosts) - (line.nodes() or len(hosts)))
        return HostPool(hosts, form_for(line), probe_words(probe or BY_SRUN, line), spare=spare)
    if environ.get("PBS_NODEFILE") and line.launcher != SRUN:
        return HostPool(tuple(read_file(environ["PBS_NODEFILE"])), form_for(line), probe_words(probe, line))
    return None


def form_of(path: str) -> str:
    """The form of a hostfile that could be read."""
    text = re.sub(rb"#.*", b"", read_whole(path, MOST_BYTES))
    return "openmpi" if b"=" in text else "mpich" if b":" in text else PLAIN


def form_for(line: LaunchLine) -> str:
    """The form of a hostfile that the launcher of a command reads, by what it says of itself."""
    if line.launcher in ("", SRUN):
        return PLAIN
    question = [*line.words[: line.begin + 1], "--version"]
    try:
        answer = subprocess.run(question, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS)
    except (OSError, subprocess.SubprocessError):
        return "mpich"
    return "openmpi" if any(name in answer.stdout for name in OPEN_MPI) else "mpich"


def probe_words(given: str, line: LaunchLine) -> tuple[str, ...]:
    """The words of a question to a host: as given, or as the launcher goes there. Raises UsageError."""
    agent = line.agent()
    text = given or (f"{shlex.quote(agent)} {HERE} true" if agent not in ("", "ssh") else BY_SSH)
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--probe {shown(text)}: not a command: {error}") from None
    if not any(HERE in word for word in words):
        raise UsageError(f"--probe {shown(text)}: expected {HERE} where the host's name belongs")
    return words


def slurm_hosts(environ: Mapping[str, str], wanted: str = "") -> tuple[HostEntry, ...]:
    """The nodes of a Slurm job and how many ranks each takes; of these the wanted ones. Raises UsageError."""
    names = node_names(environ["SLURM_JOB_NODELIST"])
    tasks = environ.get("SLURM_TASKS_PER_NODE", "")
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
    counts = [int(ranks) for ranks, times in found for _ in range(int(times or 1))]
    counts += [counts[-1] if counts else 1] * (len(names) - len(counts))
    kept = {*node_names(wanted)} if wanted and "/" not in wanted else {*names}
    nodes = zip(names, counts, strict=False)
    return tuple(HostEntry(name, max(1, count)) for name, count in nodes if name in kept)


def node_names(nodelist: str) -> list[str]:
    """The nodes of a list as Slurm writes it: n[1-3]. Raises UsageError."""
    question = ["scontrol", "show", "hostnames", nodelist]
    try:
        answer = subprocess.run(question, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS)
        names = read_hosts(answer.stdout.decode().splitlines(), "scontrol show hostnames")
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError) as error:
        raise UsageError(f"scontrol does not name the nodes of this job ({error}); give --hostfile") from None
    return [host.name for host in names]
