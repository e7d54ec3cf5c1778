"""Time limit of a run, from --max-time or from the batch system.

At a job's limit, Slurm and PBS send a signal and, seconds later, SIGKILL: too little time to save a large
model. So rank 0 queries the end time beforehand. A job's variables show the limit at its start, but a limit
can be extended later, so squeue or qstat reports the time left. A thread runs the command, because a busy
batch system is slow; without an answer the limit is kept.
"""

import math
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zero_mpi.environment.limits import process_age

INTERVAL = 240.0  # seconds between two queries
PATIENCE = 30.0  # seconds for an answer
NOTICE = 30.0  # seconds reserved before a job's end: the job script goes on, and the end is inexact


@dataclass(frozen=True)
class BatchJob:
    """Batch job in which this process runs."""

    name: str  # for messages
    question: tuple[str, ...]  # a command that prints the time left
    read: Callable[[str], float | None]  # returns the seconds left from the answer; None if it has none
    at_start: float | None  # seconds left at the start, by the job's variables


def find_job(environ: Mapping[str, str] = os.environ) -> BatchJob | None:
    """Return the batch job that variables in `environ` describe; None if there is none."""
    if number := environ.get("SLURM_JOB_ID"):
        array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
        if array and task:  # one task has the same id as the full array
            number = f"{array}_{task}"
        end = clock_seconds(environ.get("SLURM_JOB_END_TIME", ""))
        remaining = None if end is None else end - time.time()
        question = ("squeue", "--noheader", "--jobs", number, "--format=%L")
        return BatchJob(f"Slurm job {number}", question, slurm_left, remaining)
    if number := environ.get("PBS_JOBID"):
        limit = clock_seconds(environ.get("PBS_WALLTIME", ""))  # set by Torque
        remaining = None if limit is None else limit - process_age()
        return BatchJob(f"PBS job {number}", ("qstat", "-f", number), pbs_left, remaining)
    return None


def slurm_left(answer: str) -> float | None:
    """Return the seconds left from squeue's %L, such as 1-02:03:04 or UNLIMITED."""
    text = answer.strip()
    return math.inf if text == "UNLIMITED" else clock_seconds(text)


def pbs_left(answer: str) -> float | None:
    """Return the time limit minus the used time in seconds, from the output of qstat -f.

    PBS updates the used time only every few minutes, and at first it is missing; but the job is at least as
    old as this process. The job's start time cannot be used: it is a text in the server's time zone.
    """
    times = dict(re.findall(r"^\s*(Resource_List|resources_used)\.walltime = (\S+)$", answer, re.MULTILINE))
    limit = clock_seconds(times.get("Resource_List", ""))
    if limit is None:
        return None
    return limit - max(clock_seconds(times.get("resources_used", "")) or 0.0, process_age())


def clock_seconds(text: str) -> float | None:
    """Return the seconds of [days-][[hours:]minutes:]seconds; None for any other text."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def ask(job: BatchJob) -> float | None:
    """Ask the batch system for the time left; return it in seconds, or None without an answer."""
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "encoding": "utf-8", "errors": "replace"}
    try:  # safe in a process with MPI: Python uses vfork, which copies no pages
        answer = subprocess.run(job.question, capture_output=True, timeout=PATIENCE, **options)
    except (OSError, subprocess.SubprocessError):  # the command is missing, or it has not answered in time
        return None
    return job.read(answer.stdout) if answer.returncode == 0 else None


class TimeLimit:
    """Time limit of a run: `max_time` seconds after the process start, or NOTICE before the job's end."""

    def __init__(self, max_time: float | None, job: BatchJob | None, interval: float = INTERVAL) -> None:
        self._own_end = math.inf if max_time is None else time.monotonic() - process_age() + max_time
        self._job, self._job_end = job, math.inf
        if job is not None:
            if job.at_start is not None and job.at_start > 0:  # if the end has passed, the limit was extended
                self._job_end = time.monotonic() + job.at_start
            args = job, interval
            threading.Thread(target=self._keep_asking, args=args, name="zero_mpi batch", daemon=True).start()

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
            remaining = ask(job)
            if remaining is not None:
                self._job_end = time.monotonic() + remaining
            time.sleep(interval)
