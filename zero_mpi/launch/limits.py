"""Limits of a run by the system and the batch system: memory, processor time, files, and time.

`environment.control_groups` has the limits that containers and batch systems set. Slurm and PBS end a job at
its limit with a signal and, seconds later, with SIGKILL: too late to save a large model. So rank 0 asks for
the end time beforehand. A job's variables have the end as of the start; squeue and qstat print the time left
now, since limits get extended. A thread calls them, because a busy batch system is slow and no step should
wait for it; without an answer nothing changes.
"""

from __future__ import annotations

import math
import os
import re
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from zero_mpi import environment
from zero_mpi.environment.control_groups import group_limits

MEMINFO = Path("/proc/meminfo")
INFINIBAND = Path("/sys/class/infiniband")

INTERVAL = 240.0  # seconds between two questions
PATIENCE = 30.0  # seconds for an answer
NOTICE = 30.0  # seconds before a job's end reserved for the job script and for an inexact end

_imported = time.monotonic()


@dataclass(frozen=True)
class Limits:
    """Limits of a process and its host, in bytes, cores and files; None for no limit."""

    available: int  # memory available without swapping, as the system says
    group_memory: int | None  # limit of the control group
    group_room: int | None  # the rest of it
    group_cores: float | None
    address_space: int | None
    data: int | None  # private memory that can be written to
    locked: int | None  # matters only if a network needs locked memory
    files: int | None
    cores: int

    @property
    def memory(self) -> int:
        return self.available if self.group_room is None else min(self.available, self.group_room)


def look() -> Limits:
    """Return the limits of this process."""

    def soft(which: int) -> int | None:
        limit = resource.getrlimit(which)[0]
        return None if limit == resource.RLIM_INFINITY else limit

    memory, room, cores = group_limits()
    return Limits(
        available=available_memory(),
        group_memory=memory,
        group_room=room,
        group_cores=cores,
        address_space=soft(resource.RLIMIT_AS),
        data=soft(resource.RLIMIT_DATA),
        locked=soft(resource.RLIMIT_MEMLOCK) if INFINIBAND.is_dir() and any(INFINIBAND.iterdir()) else None,
        files=soft(resource.RLIMIT_NOFILE),
        cores=environment.cores(),
    )


def available_memory(meminfo: Path = MEMINFO) -> int:
    """Return MemAvailable of /proc/meminfo in bytes."""
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def process_age(process: int | str = "self") -> float:
    """Return the seconds since the start of a process; for this process they include imports."""
    try:
        started = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):  # no such file system, no such clock
        return time.monotonic() - _imported


# ------------------------------------------------------------------------------------------------- time


@dataclass(frozen=True)
class BatchJob:
    """The batch job around this process."""

    name: str  # for messages
    question: tuple[str, ...]  # a command that prints the time left
    read: Callable[[str], float | None]  # returns the seconds left in its answer; None: not in it
    at_start: float | None  # seconds left according to the job's variables


def find_job(environ: Mapping[str, str] = os.environ) -> BatchJob | None:
    """Return the batch job whose variables are in `environ`, if there are any."""
    if number := environ.get("SLURM_JOB_ID"):
        array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
        if array and task:  # by its number, for one task of an array has the id that stands for all
            number = f"{array}_{task}"
        end = clock_seconds(environ.get("SLURM_JOB_END_TIME", ""))
        left = None if end is None else end - time.time()
        question = ("squeue", "--noheader", "--jobs", number, "--format=%L")
        return BatchJob(f"Slurm job {number}", question, slurm_left, left)
    if number := environ.get("PBS_JOBID"):
        limit = clock_seconds(environ.get("PBS_WALLTIME", ""))  # of Torque
        left = None if limit is None else limit - process_age()
        return BatchJob(f"PBS job {number}", ("qstat", "-f", number), pbs_left, left)
    return None


def slurm_left(answer: str) -> float | None:
    """Return the seconds in squeue's %L, such as 1-02:03:04 or UNLIMITED."""
    text = answer.strip()
    return math.inf if text == "UNLIMITED" else clock_seconds(text)


def pbs_left(answer: str) -> float | None:
    """Return limit minus use in seconds, from qstat -f.

    PBS updates the use only every few minutes, and at first there is none; the job is at least as old as this
    process. Its start time is not usable: it is text in the server's time zone.
    """
    found = dict(re.findall(r"^\s*(Resource_List|resources_used)\.walltime = (\S+)$", answer, re.MULTILINE))
    limit = clock_seconds(found.get("Resource_List", ""))
    if limit is None:
        return None
    return limit - max(clock_seconds(found.get("resources_used", "")) or 0.0, process_age())


def clock_seconds(text: str) -> float | None:
    """Return the seconds of [days-][[hours:]minutes:]seconds; None for any other text."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def ask(job: BatchJob) -> float | None:
    """Return the seconds left according to the batch system, or None without an answer.

    Starting a process from one in which MPI runs is safe: Python uses vfork, which copies no pages.
    """
    try:
        answer = subprocess.run(
            job.question,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PATIENCE,
            encoding="utf-8",
            errors="replace",
        )
    except (OSError, subprocess.SubprocessError):  # no such command; no answer in time
        return None
    return job.read(answer.stdout) if answer.returncode == 0 else None


class TimeLimit:
    """The end of a run: `max_time` seconds after the start of the process or NOTICE before the job's end."""

    def __init__(self, max_time: float | None, job: BatchJob | None, interval: float = INTERVAL) -> None:
        self._own_end = math.inf if max_time is None else time.monotonic() - process_age() + max_time
        self._job, self._job_end = job, math.inf
        if job is not None:
            if job.at_start is not None and job.at_start > 0:  # a limit that is already past was extended
                self._job_end = time.monotonic() + job.at_start
            asking = threading.Thread(target=self._keep_asking, args=(job, interval), name="zero_mpi batch")
            asking.daemon = True
            asking.start()

    def left(self) -> float:
        """Return the seconds until the run should end; infinite if there is no limit."""
        return min(self._own_end, self._job_end - NOTICE) - time.monotonic()

    @property
    def name(self) -> str:
        if self._job is None or self._own_end <= self._job_end - NOTICE:
            return "--max-time"
        return f"the end of {self._job.name}"

    def _keep_asking(self, job: BatchJob, interval: float) -> None:
        while True:
            left = ask(job)
            if left is not None:
                self._job_end = time.monotonic() + left
            time.sleep(interval)
