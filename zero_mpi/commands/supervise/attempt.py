"""One start of a run: creates its process group, waits for its end, and finds out how it ended.

The launcher leads the group. Only the launcher gets stop signals, and it forwards them. A run that may have
missed the signal gets it again every few seconds, as in the job scripts. If a launcher still runs long after
the run wrote its last state, or long after the last change in the run folder, it must be waiting for a lost
host, and its group is killed. If this process is killed, the kernel signals the launcher.

The run's status.json takes precedence over the launcher's exit status. A launcher may return 0 after a lost
host, and Open MPI's launcher returns 1 although the run saved and stopped as requested. If a failure repeats
at the same step, on the same hosts and without a new checkpoint, the run is not started again.
"""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from zero_mpi.checkpoint.folders import LATEST
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import one_line, show
from zero_mpi.files.open import reason
from zero_mpi.launch import folder_lock, stopping
from zero_mpi.launch.ending import BAD_USAGE, FAILED, REQUEUE
from zero_mpi.launch.stopping import INTERRUPTED, SIGNALS, TWICE
from zero_mpi.telemetry import events, status
from zero_mpi.telemetry.metrics import METRICS, last_step

NO_FOLDER = Path(os.devnull)  # used as run folder if the command has none
NO_CHECKPOINT = "", 0
SIGNS = (METRICS, events.NAME, status.NAME, folder_lock.NAME)  # files that change while a run is alive
MOST_REASON = 400  # maximum number of characters of a reason that is shown
LOOK = 0.1  # seconds between checks of the launcher process
CHECK_RUN_SECONDS = 1.0  # seconds between checks of the run folder
AGAIN = 5.0  # seconds after which the run gets a stop signal again
LINGER = 60.0  # seconds that a launcher may keep running after the run wrote its last state
GRACE = 10.0  # seconds from SIGTERM to SIGKILL
PR_SET_PDEATHSIG = 1  # option of Linux's prctl

_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class RunFolder:
    """Run folder: status, newest checkpoint, and the times of files that change while the run lives."""

    path: Path

    def run_status(self) -> Mapping[str, Any]:
        return status.read_status(self.path / status.NAME)

    def checkpoint(self) -> tuple[str, int]:
        """Return the name and the time of the newest complete checkpoint, or NO_CHECKPOINT."""
        try:
            folder = self.path / LATEST
            return Path(os.readlink(folder)).name, os.stat(folder).st_mtime_ns
        except OSError:
            return NO_CHECKPOINT

    def signs(self) -> list[tuple[int, int]]:
        """Return times and sizes of the files that change while a run lives, such as records and lock."""
        signs = []
        for name in SIGNS:
            with contextlib.suppress(OSError):
                stat = os.stat(self.path / name)
                signs.append((stat.st_mtime_ns, stat.st_size))
        return signs

    def await_release(self, seconds: float, is_over: Callable[[], bool]) -> None:
        """Wait while a process on this machine, such as a rank whose launcher died, holds the folder."""
        deadline = time.monotonic() + seconds
        lock = self.path / folder_lock.NAME
        while folder_lock.is_held_here(lock) and time.monotonic() < deadline and not is_over():
            time.sleep(LOOK)

    def note(self, event: str, step: int, **facts: Any) -> None:
        if self.path.is_dir():
            writer = events.Events(self.path, 0)
            writer.at(step)
            writer.note(event, **facts)


@dataclass(frozen=True)
class Ending:
    """End of an attempt: exit status, reason, and the decision whether the run is over."""

    status: int  # exit status of the launcher, as in a shell
    run_status: Mapping[str, Any]  # content of status.json; empty if this start did not write it
    ended_for: str = ""  # why the supervisor ended the run; "" if it ended by itself
    step: int = 0  # the last recorded step
    progressed: bool = False  # whether there is a new checkpoint

    @property
    def reason(self) -> str:
        state, cause = self.run_status.get("state"), self.run_status.get("reason")
        if state == status.FAILED and isinstance(cause, str) and cause:
            return one_line(cause)[:MOST_REASON]
        if self.ended_for:
            return self.ended_for
        names = {128 + number: f" ({number.name})" for number in signal.Signals}  # status in a shell -> name
        suffix = ": killed, or a host was lost" if state == status.RUNNING else ""
        return f"status {self.status}{names.get(self.status, '')}{suffix}"

    @property
    def failure_status(self) -> int:
        """Exit status that reports a failure: neither 0 nor a status with another meaning."""
        return FAILED if self.status in (0, BAD_USAGE, REQUEUE) else self.status

    def final_status(self, stop_requested: bool) -> int | None:
        """Return the exit status if the run is over; None if it must be started again.

        `stop_requested` says whether the run was asked to stop.
        """
        state = self.run_status.get("state")
        if state == status.DONE or (self.status == 0 and state is None and not self.ended_for):
            return 0
        if state == status.STOPPED or self.status == REQUEUE:
            return REQUEUE
        if self.status in (BAD_USAGE, INTERRUPTED) and not self.ended_for:
            return self.status
        if stop_requested:
            return REQUEUE if state is None else self.failure_status
        return None

    def fingerprint(self, hosts: Sequence[str]) -> tuple[object, ...]:
        """Return values that are equal if a failure repeats. Numbers in its reason are ignored."""
        return self.status, re.sub(r"\d+(\.\d+)?", "N", self.reason), self.step, tuple(hosts)


class StopRequest:
    """Stop signals received so far. `signal_name` names the first; `at_once` means a second Ctrl-C."""

    def __init__(self) -> None:
        self.signal_name, self.at_once = "", False
        self._interrupt_time = 0.0

    def listen(self) -> None:
        for number in SIGNALS:
            stopping.handle(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = self.signal_name or signal.Signals(number).name
        if number == signal.SIGINT:
            now = time.monotonic()
            self.at_once |= bool(self._interrupt_time) and now - self._interrupt_time > TWICE
            self._interrupt_time = self._interrupt_time or now


class Attempt:
    """One start of the run, and what has changed in its folder since then."""

    def __init__(self, folder: RunFolder, stop: StopRequest, hang_after: float) -> None:
        self._folder, self._stop, self._hang_after = folder, stop, hang_after
        self._first_status, self._checkpoint = folder.run_status(), folder.checkpoint()
        self._signs, self._alive_at = folder.signs(), time.monotonic()
        self._end_time: float | None = None
        self._signaled_at = self._checked_at = float("-inf")

    def run(self, command: Sequence[str], settings: Mapping[str, str]) -> Ending:
        """Run the command and return its `Ending`. Raise UsageError if it cannot be started.

        `settings` are environment variables that are added to those of this process.
        """
        try:
            job = subprocess.Popen(
                command,
                env=os.environ | settings,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=partial(_libc.prctl, PR_SET_PDEATHSIG, signal.SIGTERM),  # when this process ends
            )
        except OSError as error:
            raise UsageError(f"{show(command[0])} cannot be started: {reason(error)}") from None
        ended_for = ""
        try:
            while not has_ended(job) and not ended_for:
                time.sleep(LOOK)
                ended_for = self._check_run(job)
        finally:  # leave no process behind, even after an error
            if not has_ended(job):
                os.killpg(job.pid, signal.SIGTERM)
                deadline = time.monotonic() + GRACE
                while not has_ended(job) and time.monotonic() < deadline:
                    time.sleep(LOOK)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(job.pid, signal.SIGKILL)  # kills the remaining processes of the group
            code = job.wait()
        progressed = self._folder.checkpoint() not in (self._checkpoint, NO_CHECKPOINT)
        end = 128 - code if code < 0 else code
        return Ending(end, self._run_status(), ended_for, last_step(self._folder.path / METRICS), progressed)

    def _run_status(self) -> Mapping[str, Any]:
        content = self._folder.run_status()
        return {} if content == self._first_status else content

    def _check_run(self, job: subprocess.Popen[bytes]) -> str:
        """Return why the run must be ended now; "" if it may go on."""
        now = time.monotonic()
        if self._stop.at_once:
            return "stopped by a second signal"
        if self._stop.signal_name and self._end_time is None and now - self._signaled_at > AGAIN:
            self._signaled_at = now
            os.kill(job.pid, signal.SIGUSR1)  # the process was not waited for, so its pid is not reused
        if now - self._checked_at < CHECK_RUN_SECONDS:
            return ""
        self._checked_at = now
        last_words = status.DONE, status.STOPPED, status.FAILED
        if self._end_time is None and self._run_status().get("state") in last_words:
            self._end_time = now
        if self._end_time is not None and now - self._end_time > LINGER:
            return f"the launcher did not end within {LINGER:.0f} s after the run"
        return self._silence(now)

    def _silence(self, now: float) -> str:
        """Return a reason if nothing in the run folder has changed for too long, else ""."""
        signs = self._folder.signs()
        if signs != self._signs:
            self._signs, self._alive_at = signs, now
        if self._folder.path == NO_FOLDER or not 0 < self._hang_after < now - self._alive_at:
            return ""
        return f"no change in the run folder for {self._hang_after:g} s"


def has_ended(job: subprocess.Popen[bytes]) -> bool:
    """Return whether the launcher has ended. It is not reaped, so its group id is not reused."""
    return os.waitid(os.P_PID, job.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
