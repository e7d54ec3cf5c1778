"""One start of the run: from its own process group to the end of the last process in it.

The launcher is the leader of the group and alone is asked to stop: it forwards that. A run that was asked
before it could hear is asked again every few seconds, as the job scripts do. A launcher that
goes on after the run has written its last state, or without any change of the run for long, waits for a host
that is gone: its group is ended. If this process is killed, the kernel signals the launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

from zero_mpi.commands.supervise.decision import Ending, RunFacts
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import show
from zero_mpi.files.open import reason
from zero_mpi.launch import stopping
from zero_mpi.launch.stopping import SIGNALS, TWICE
from zero_mpi.telemetry import status as words


class StopRequest:
    """Signals that this process got: `told`, the first one's name, and `at_once`."""

    def __init__(self) -> None:
        self.told, self.at_once = "", False
        self._interrupted = 0.0

    def listen(self) -> None:
        for number in SIGNALS:
            stopping.handle(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.told = self.told or signal.Signals(number).name
        if number == signal.SIGINT:
            now = time.monotonic()
            self.at_once |= bool(self._interrupted) and now - self._interrupted > TWICE
            self._interrupted = self._interrupted or now


LOOK = 0.1  # seconds between looks at the process
LOOK_AT_RUN = 1.0  # seconds between looks at the folder of the run
AGAIN = 5.0  # seconds after which a run is asked again to stop
LINGER = 60.0  # seconds that a launcher may go on after the run's last state
GRACE = 10.0  # seconds from SIGTERM to SIGKILL
LAST_WORDS = (words.DONE, words.STOPPED, words.FAILED)
PR_SET_PDEATHSIG = 1  # option of Linux's prctl

_libc = ctypes.CDLL(None)


class Attempt:
    """Run that was started, and what has been seen of it."""

    def __init__(self, facts: RunFacts, stop: StopRequest, hang_after: float) -> None:
        self._facts, self._stop, self._hang_after = facts, stop, hang_after
        self._before, self._checkpoint = facts.word(), facts.checkpoint()
        self._signs, self._alive_at = facts.signs(), time.monotonic()
        self._over_since: float | None = None
        self._told_at: float | None = None
        self._looked_at = 0.0

    def run(self, command: Sequence[str], settings: Mapping[str, str]) -> Ending:
        """Start the command and wait for its end. Raises UsageError if there is no such command.

        settings: environment variables beside those of this process
        """
        try:
            job = subprocess.Popen(
                command,
                env=os.environ | settings,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=partial(_libc.prctl, PR_SET_PDEATHSIG, signal.SIGTERM),  # once its parent is gone
            )
        except OSError as error:
            raise UsageError(f"{show(command[0])} cannot be started: {reason(error)}") from None
        ended_for = ""
        try:
            while not has_ended(job) and not ended_for:
                time.sleep(LOOK)
                ended_for = self._look(job)
        finally:  # after any error, no process is left behind
            if not has_ended(job):
                end_group(job)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(job.pid, signal.SIGKILL)  # the remaining processes of the group
            code = job.wait()
        return Ending(
            128 - code if code < 0 else code,
            self._said(),
            ended_for,
            self._facts.step(),
            self._facts.checkpoint() not in (self._checkpoint, ("", 0)),
        )

    def _said(self) -> Mapping[str, Any]:
        """Return the status that the run has written since this start."""
        word = self._facts.word()
        return {} if word == self._before else word

    def _look(self, job: subprocess.Popen[bytes]) -> str:
        """Return why the run must be ended now; empty while it goes on."""
        now = time.monotonic()
        if self._stop.at_once:
            return "stopped by a second signal"
        if self._stop.told and self._over_since is None:
            self._tell(job, now)
        if now - self._looked_at < LOOK_AT_RUN:
            return ""
        self._looked_at = now
        if self._over_since is None and self._said().get("state") in LAST_WORDS:
            self._over_since = now
        if self._over_since is not None and now - self._over_since > LINGER:
            return f"the launcher did not end within {LINGER:.0f} s after the run"
        return self._silence(now)

    def _silence(self, now: float) -> str:
        signs = self._facts.signs()
        if signs != self._signs:
            self._signs, self._alive_at = signs, now
        if self._facts.out is None or not 0 < self._hang_after < now - self._alive_at:
            return ""
        return f"no change in the run folder for {self._hang_after:g} s"

    def _tell(self, job: subprocess.Popen[bytes], now: float) -> None:
        if self._told_at is None or now - self._told_at > AGAIN:
            self._told_at = now
            os.kill(job.pid, signal.SIGUSR1)  # the process is not reaped yet, so no other has its number


def has_ended(job: subprocess.Popen[bytes]) -> bool:
    """Return whether the leader has ended; it is not reaped, so that its group keeps its number."""
    return os.waitid(os.P_PID, job.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def end_group(job: subprocess.Popen[bytes]) -> None:
    """Ask all processes of the group to end, and wait a while for the leader."""
    os.killpg(job.pid, signal.SIGTERM)
    until = time.monotonic() + GRACE
    while not has_ended(job) and time.monotonic() < until:
        time.sleep(LOOK)
