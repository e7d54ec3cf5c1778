"""Simulated hosts on this machine with names, links and separate memory, and jobs on them.

    with hosts(2, "1gbit") as here:
        status, printed, errors = here.run(4, 2, ["-m", "zero_mpi.train", "--out", str(here.folder / "out")])

`tools/cluster/hosts_up.sh` creates them. They are removed when the block ends or this process is killed: a
separate shell waits for the end of its standard input and removes them. /tmp and /dev/shm differ from
host to host, so files that ranks read and write belong in `folder`.
"""

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import which

import jobs
from keeper import kept

from zero_mpi.commands.hostfile import LINES, HostEntry

# variables that name the python of an environment with another MPI, e.g. OPENMPI
PYTHON = "ZERO_MPI_{}_PYTHON"
SITE = "ZERO_MPI_SITE_MPICH"  # output of tools/cluster/debian_mpich.sh
LAUNCHERS = {  # MPI -> text in the launcher's --version
    "mpich": ("HYDRA", "MPICH"),
    "openmpi": ("Open MPI", "PRRTE"),
    "openmpi4": ("(Open MPI) 4",),
    "impi": ("Intel(R) MPI",),
}
FORMS = {"impi": "mpich"}  # launchers that use the hostfile format of another MPI
# MPI cannot see that the hosts share cores, so its waits must yield the core. Open MPI's hierarchical
# collectives abort or hang over such hosts.
OPENMPI_FLAGS = "--allow-run-as-root --bind-to none --mca mpi_yield_when_idle 1 --mca coll ^han"
# Open MPI passes only its own variables to other hosts, and BLAS settings change the last bits.
CARRIED = ("ZERO_MPI_", "OPENBLAS_", "MKL_", "OMP_", "NUMBA_")


@dataclass(frozen=True)
class Traffic:
    """Numbers of bytes through a host's link since its start, with the headers of all layers."""

    received: int
    sent: int


@dataclass(frozen=True)
class Hosts:
    """Running hosts h1, h2, ...; `state` is the folder of hosts_up.sh."""

    state: Path
    names: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return self.state / "runs"

    def run(
        self,
        ranks: int,
        per_host: int,
        args: Sequence[str | os.PathLike[str]],
        *,
        mpi: str = "mpich",
        timeout: float = 120,
        env: Mapping[str, str] | None = None,
    ) -> tuple[int, str, str]:
        """Run `python args...` on the first hosts with `per_host` ranks each, like `jobs.run_job`."""
        command = self.job(ranks, per_host, args, mpi=mpi, env=env)
        return jobs.run_command(command, timeout=timeout, env=env, cwd=self.folder)

    def job(
        self,
        ranks: int,
        per_host: int,
        args: Sequence[str | os.PathLike[str]],
        *,
        mpi: str = "mpich",
        env: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Return the command of a job to start in `folder` with `jobs.clean_environment()` and `env`."""
        python, launcher = installed(mpi)
        names = self.names[: -(-ranks // per_host)]
        assert len(names) * per_host >= ranks, f"{ranks} ranks do not fit on {len(names)} hosts"
        hostfile = self.state / f"{len(names)}x{per_host}.{mpi}"
        line = LINES[FORMS.get(mpi, mpi)]
        hostfile.write_text("".join(f"{line(HostEntry(name, per_host))}\n" for name in names))
        flag = "-machinefile" if mpi == "impi" else "--hostfile"  # impi ignores ranks per host in a hostfile
        start = [launcher, flag, str(hostfile), "-n", str(ranks)]
        if mpi == "openmpi":
            start += ["--prtemca", "plm_ssh_agent", str(self.state / "ssh"), *OPENMPI_FLAGS.split()]
            carried = {k: v for k, v in jobs.clean_environment().items() if k.startswith(CARRIED)}
            for name, value in (carried | dict(env or {})).items():
                start += ["-x", f"{name}={value}"]
        else:
            start += ["-launcher-exec", str(self.state / "ssh")]
            if mpi == "impi":  # otherwise the ranks of all hosts would be bound to the first core
                start += ["-genv", "I_MPI_PIN", "0", "-genv", "I_MPI_THREAD_YIELD", "2"]
            elif ranks > os.cpu_count():
                start += ["-genv", "MPIR_CVAR_ENABLE_HEAVY_YIELD", "1"]
        return self.on(self.names[0], *start, python, *map(str, args))

    def on(self, host: str, *command: str | os.PathLike[str]) -> list[str]:
        return [str(self.state / "enter"), host, *map(str, command)]

    def inside(
        self, host: str, *command: str | os.PathLike[str], timeout: float = 20
    ) -> tuple[int, str, str]:
        """Run a command inside a host; return (exit status, stdout, stderr)."""
        return jobs.run_command(self.on(host, *command), timeout=timeout, cwd=self.folder)

    def process(self, host: str) -> int:
        """Return the id, on this machine, of a host's first process; the host ends with this process."""
        return int((self.state / f"{host}.pid").read_text().split()[0])

    def lose(self, host: str) -> None:
        os.kill(self.process(host), signal.SIGKILL)

    def set_link(self, host: str, up: bool) -> None:
        status, _, errors = self.inside(host, "ip", "link", "set", "eth0", "up" if up else "down")
        assert status == 0, errors

    def traffic(self) -> dict[str, Traffic]:
        return {host: self._traffic(host) for host in self.names}

    def _traffic(self, host: str) -> Traffic:
        lines = Path(f"/proc/{self.process(host)}/net/dev").read_text().splitlines()
        (counts,) = (line.partition(":")[2].split() for line in lines if line.strip().startswith("eth0:"))
        return Traffic(received=int(counts[0]), sent=int(counts[8]))


@contextlib.contextmanager
def hosts(count: int, rate: str | None = None) -> Iterator[Hosts]:
    """Start `count` hosts with links of `rate` ("1gbit"; None: no limit); raise RuntimeError on failure."""
    if reason := why_no_hosts():
        raise RuntimeError(reason)
    named = (os.environ.get(PYTHON.format(mpi.upper())) for mpi in LAUNCHERS)
    pythons = {sys.executable, *filter(None, named)}
    shared = ":".join(sorted(str(Path(python).parents[1]) for python in pythons))
    with kept("hosts", str(count), rate or "none", env=os.environ | {"HOSTS_SHARE": shared}) as state:
        yield Hosts(state, tuple(f"h{number + 1}" for number in range(count)))


@functools.cache
def why_no_hosts() -> str:
    if os.geteuid() != 0:
        return "hosts need root, to make namespaces"
    missing = [
        name for name in ("ip", "tc", "unshare", "nsenter", "ssh", "ssh-keygen") if which(name) is None
    ]
    missing += [] if Path("/usr/sbin/sshd").exists() else ["sshd"]
    if missing:
        return f"hosts need {', '.join(missing)}: apt-get install openssh-server iproute2 util-linux"
    probe = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc"]
    probe += ["sh", "-c", "mount -t tmpfs none /tmp && ip link add br0 type bridge && ip link add type veth"]
    status, _, errors = jobs.run_command(probe, timeout=20)
    return f"no namespaces here: {errors.strip() or f'unshare ended with {status}'}" if status else ""


@functools.cache
def installed(mpi: str) -> tuple[str, str]:
    """Return (python, launcher) of an environment with this MPI; raise LookupError if there is none."""
    launcher = jobs.launcher()[0]
    if is_launcher_of(launcher, mpi):
        return sys.executable, launcher
    variable = PYTHON.format(mpi.upper())
    python = os.environ.get(variable, "")
    if not python:
        raise LookupError(
            f"{mpi} is not the installed MPI, and {variable} names no python of an environment with it"
        )
    program = "mpiexec" if mpi == "impi" else "mpirun"  # Intel's mpirun is a script
    launcher = str(Path(python).parent / program)
    if not is_launcher_of(launcher, mpi):
        raise LookupError(f"{variable}={python}: {launcher} is missing or not {mpi}'s")
    return python, launcher


def site_variables() -> dict[str, str]:
    """Return variables that make mpi4py load a site's MPICH; raise LookupError if none are set."""
    if SITE not in os.environ:
        raise LookupError(f"{SITE} is not set: tools/cluster/debian_mpich.sh FOLDER prints its value")
    return dict(word.split("=", 1) for word in os.environ[SITE].split())


def is_launcher_of(launcher: str, mpi: str) -> bool:
    try:
        _, printed, _ = jobs.run_command([launcher, "--version"], timeout=20, merge=True)
    except OSError:
        return False
    return any(word in printed for word in LAUNCHERS[mpi])
