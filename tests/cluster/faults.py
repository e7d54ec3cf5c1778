"""Table of events that a run must survive or report, and a real run in which an event happens.

`ROWS` is the table of docs/reliability.md. The table has the expected result of each event, no matter when
it happens. `Trial` is one run of the real command, slowed down so that the event happens while it runs. A
rank triggers its own faults when the file `now` appears. External events are in test_faults.py.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent, indent

from jobs import RANK_VARIABLES, clean_environment, end
from patched import train_with

STEPS, SAVE_EVERY = 60, 5  # steps and save interval of every run
RANKS, VICTIM = 3, 1  # number of ranks, and the rank that fails
TIMEOUT = 5.0  # --timeout of a run that the timeout must end
PATIENT = 100.0  # --timeout of other runs; a pause of the machine must not end them
KILLED = (9, 137)  # statuses of the launcher after a rank was killed


@dataclass(frozen=True)
class Fault:
    """Row of the table.

    statuses  allowed exit statuses of the launcher
    said      pattern of stderr, or of the launcher's stdout; empty: stderr is empty.
              <process>: process id of the affected rank
    state     pattern of the state in status.json after all ranks have ended
    reason    pattern of the reason in status.json, if the state is failed
    seconds   maximum seconds from the event to the end of the job, on a busy machine
    lost      maximum number of steps that a restart repeats
    """

    event: str
    launcher: str
    transport: str
    statuses: tuple[int, ...]
    said: str
    state: str
    reason: str = ""
    seconds: float = 8.0
    lost: int = SAVE_EVERY

    @property
    def name(self) -> str:
        return f"{self.event}, {self.launcher}, {self.transport}"

    @property
    def timeout(self) -> float:
        ends_by_it = 86 in self.statuses or self.event == "host lost"
        return TIMEOUT if ends_by_it else PATIENT


# Events that a rank causes itself.
INSIDE = {
    "exception on one rank": 'raise RuntimeError("the fault")',
    "sys.exit(3) on one rank": "sys.exit(3)",
    "no memory under ulimit -v": """
        import resource
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
        bytearray(1 << 30)""",
    "killed for memory (cgroup)": "bytearray(b'x') * (1 << 30)",
}
ENDED = rf"\W+zero_mpi: rank {VICTIM} of {RANKS} failed"
RAISED, NO_ROOM = "RuntimeError: the fault", "MemoryError"
OF_VICTIM = rf"rank {VICTIM}: "
LEFT = rf"rank {VICTIM} of {RANKS} left alone \(exit with status 3\)"
LEFT_ALONE = rf"rank {VICTIM} left alone \(exit with status 3\)"
SILENT = rf"no sign of life from rank {VICTIM}\b"
MPICH_KILLED = r"Killed \(signal 9\)"  # MPICH's launcher names a process, but sometimes the wrong process
OPENMPI_KILLED = rf"process rank {VICTIM} with PID <process> on"
LONGER = 2 * SAVE_EVERY
DISK = r"cannot write \S+: No space left on device"
GONE, STANDS = r"Connection to h2 closed", r"no progress for \d+\.\d s: "
CUT_OFF = rf"{STANDS}|Remote host:\s+h2\b"  # ssh reports the lost connection at about the same time

ROWS = [
    Fault("exception on one rank", "mpich", "mpi", (1,), RAISED + ENDED, "failed", OF_VICTIM + RAISED),
    Fault("exception on one rank", "mpich", "shared", (1,), RAISED + ENDED, "failed", OF_VICTIM + RAISED),
    Fault("exception on one rank", "openmpi", "mpi", (1,), RAISED + ENDED, "failed", OF_VICTIM + RAISED),
    Fault("sys.exit(3) on one rank", "mpich", "mpi", (1,), LEFT, "failed", LEFT_ALONE),
    Fault("sys.exit(3) on one rank", "openmpi", "shared", (1,), LEFT, "failed", LEFT_ALONE),
    Fault("SIGKILL of one rank", "mpich", "mpi", KILLED, MPICH_KILLED, "running"),
    Fault("SIGKILL of one rank", "mpich", "shared", KILLED, MPICH_KILLED, "running"),
    Fault("SIGKILL of one rank", "openmpi", "shared", KILLED, OPENMPI_KILLED, "running"),
    Fault("SIGSTOP of one rank", "mpich", "mpi", (86,), SILENT, "failed", SILENT, TIMEOUT + 5),
    Fault("SIGSTOP of one rank", "mpich", "shared", (86,), SILENT, "failed", SILENT, TIMEOUT + 5),
    Fault("SIGSTOP of one rank", "openmpi", "mpi", (86,), SILENT, "failed", SILENT, TIMEOUT + 5),
    Fault("no memory under ulimit -v", "mpich", "mpi", (1,), NO_ROOM + ENDED, "failed", OF_VICTIM + NO_ROOM),
    Fault("killed for memory (cgroup)", "mpich", "shared", KILLED, MPICH_KILLED, "running"),
    Fault("killed for memory (cgroup)", "openmpi", "mpi", KILLED, OPENMPI_KILLED, "running"),
    Fault("host lost", "mpich", "mpi", (255,), GONE, "running"),
    Fault("host lost", "mpich", "shared", (255,), GONE, "running"),
    Fault("host lost", "openmpi", "mpi", (0, 255), GONE, "running|failed", STANDS),
    Fault("link cut", "mpich", "mpi", (86,), STANDS, "failed", STANDS, TIMEOUT + 15),
    Fault("link cut", "mpich", "shared", (86,), STANDS, "failed", STANDS, TIMEOUT + 15),
    Fault("link cut", "openmpi", "mpi", (86, 255), CUT_OFF, "failed", STANDS, TIMEOUT + 15),
    Fault("disk full", "mpich", "mpi", (1,), DISK, "failed", DISK),
    Fault("disk full", "openmpi", "shared", (1,), DISK, "failed", DISK),
    Fault("clock jumps by an hour", "mpich", "shared", (0,), "", "done", seconds=30.0, lost=0),
    Fault("clock jumps by an hour", "openmpi", "mpi", (0,), "", "done", seconds=30.0, lost=0),
    Fault("token file cut short", "mpich", "mpi", (0,), "", "done", seconds=30.0, lost=0),
    Fault("token file cut short before the start", "mpich", "mpi", (2,), r"tokens\.npy", "stopped"),
    Fault("newest checkpoint cut short", "mpich", "mpi", KILLED, MPICH_KILLED, "running", lost=LONGER),
]

# The real command, slowed down. A rank looks for the file `now` at the beginning of each step.
PACED = """
time.sleep(0.1)
if rank == {rank} and os.path.exists({now!r}):
{fault}
"""

# A library that shifts the clock of rank 0 by the seconds in a file; it is loaded before the C library.
CLOCK = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long *off;

__attribute__((constructor)) static void begin(void) {
    const char *rank = getenv("PMI_RANK"), *path = getenv("TEST_CLOCK");
    if (!rank) rank = getenv("PMIX_RANK");
    if (!rank || !path || atoi(rank) != 0) return;
    int file = open(path, O_RDONLY);
    void *found = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) off = found;
    close(file);
}

int clock_gettime(clockid_t id, struct timespec *now) {
    int status = syscall(SYS_clock_gettime, id, now);
    if (off && !status && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += *off;
    return status;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec, now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}
"""

# Controllers in /proc (none in version 2) -> folder of control groups and name of the limit file.
CONTROL = {"": ("/sys/fs/cgroup", "memory.max"), "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")}


def memory_group() -> tuple[Path, str]:
    """Make a control group without swap; return it and its limit file; raise OSError on failure."""
    reasons = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in CONTROL:
            continue
        root, limit = CONTROL[controllers]
        group = Path(f"{root}{path}") / f"zero_mpi-{os.getpid()}"
        try:
            group.mkdir()
            if (group / limit).exists():
                for name in ("memory.swap.max", "memory.swappiness"):
                    with contextlib.suppress(OSError):
                        (group / name).write_text("0")
                return group, limit
            group.rmdir()
            reasons.append(f"{group.parent}: no {limit} there")
        except OSError as error:
            reasons.append(str(error))
    raise OSError(f"cannot limit memory by a control group: {'; '.join(reasons) or 'none are mounted'}")


class Trial:
    """Run in `folder` during which an event happens."""

    def __init__(self, folder: Path, fault: str = "pass") -> None:
        self.out, self.now, self.script = folder / "out", folder / "now", folder / "paced.py"
        self._errors, self._printed = folder / "errors", folder / "printed"
        body = PACED.format(fault=indent(dedent(fault).strip(), "    "), rank=VICTIM, now=str(self.now))
        train_with(self.script, body, method="rounds")
        self.begun = 0.0

    def start(
        self, command: Sequence[str], flags: Sequence[str], env: Mapping[str, str] | None = None
    ) -> None:
        with self._errors.open("wb") as errors, self._printed.open("wb") as printed:
            self.job = subprocess.Popen(
                [*command, str(self.script), "--out", str(self.out), *flags],
                env=clean_environment() | dict(env or {}),
                cwd=self.out.parent,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=errors,
                start_new_session=True,
            )

    @property
    def errors(self) -> str:
        return self._errors.read_text(errors="replace")

    @property
    def words(self) -> str:
        return self.errors + self._printed.read_text(errors="replace")

    @property
    def done(self) -> int:
        path = self.out / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def until(self, condition: Callable[[], bool], label: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.job.poll() is None, f"the job ended before {label}:\n{self.errors}"
            assert time.monotonic() < deadline, f"{label}: not in {seconds} s\n{self.errors}"
            time.sleep(0.01)

    def until_step(self, number: int) -> None:
        self.until(lambda: self.done >= number, f"step {number}")

    def ranks(self) -> dict[int, int]:
        """Return rank -> process of the living ranks on all simulated hosts."""
        pids = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                    lines = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                except OSError:
                    continue  # the process has ended in the meantime
                environ = dict(line.partition("=")[::2] for line in lines)
                numbers = [environ[name] for name in RANK_VARIABLES if name in environ]
                if numbers and str(self.script) in arguments:
                    pids[int(numbers[0])] = int(entry.name)
        return pids

    def end_of_job(self, seconds: float) -> float:
        """Wait until the launcher and all ranks have ended; return the seconds since the event."""
        try:
            self.job.wait(seconds + 10)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job has not ended\n{self.errors}") from None
        duration = time.monotonic() - self.begun
        assert duration < seconds, f"the job ended after {duration:.1f} s\n{self.errors}"
        while left := self.ranks():
            delay = time.monotonic() - self.begun
            assert delay < seconds + 10, f"ranks {left} are still running\n{self.errors}"
            time.sleep(0.05)
        return duration

    def happens(self, event: Callable[["Trial"], None]) -> None:
        self.victim = self.ranks().get(VICTIM, 0)
        self.begun = time.monotonic()
        event(self)

    def close(self) -> None:
        if hasattr(self, "job"):
            end(self.job)
