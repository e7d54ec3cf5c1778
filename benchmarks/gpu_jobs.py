"""Programs that are run with a limit of time, alone, side by side or in turn: none can hold up the caller.

Each is the head of a session of its own. Past its limit it is ended with all that it started; what it printed
until then counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

TIMED_OUT = 124
GRACE = 3.0  # seconds to end by itself
SHOWN = 1500  # characters of what a failed program said last


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    status: int
    printed: str
    errors: str
    seconds: float

    @property
    def objects(self) -> list[dict[str, Any]]:
        """The lines that are JSON objects."""
        return [found for line in self.printed.splitlines() if (found := as_object(line)) is not None]

    @property
    def problem(self) -> str:
        """What it said last if it failed, else nothing."""
        if self.status == 0:
            return ""
        how = "ended after its time" if self.status == TIMED_OUT else f"status {self.status}"
        said = (self.errors.strip() or self.printed.strip())[-SHOWN:]
        return f"{how}: {said}" if said else how


def as_object(line: str) -> dict[str, Any] | None:
    """A line as a JSON object, if it is one."""
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


class Job:
    """A program under way."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], cwd: Path, asked: bool = False
    ) -> None:
        self.command, self.begun = list(command), time.monotonic()
        self._printed, self._errors = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115 (kept open)
        self.process = subprocess.Popen(
            self.command,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.PIPE if asked else subprocess.DEVNULL,
            stdout=subprocess.PIPE if asked else self._printed,
            stderr=self._errors,
            start_new_session=True,
        )

    def wait(self, limit: float) -> Outcome:
        """Its end, at the latest `limit` seconds from now."""
        try:
            status = self.process.wait(max(0.0, limit))
        except subprocess.TimeoutExpired:
            status = TIMED_OUT
        self._kill()
        printed, errors = text(self._printed), text(self._errors)
        self.end()
        return Outcome(status, printed, errors, time.monotonic() - self.begun)

    def end(self) -> None:
        """End it with all that it started, and forget what it said."""
        self._kill()
        for file in (self._printed, self._errors, self.process.stdin, self.process.stdout):
            if file is not None:
                with contextlib.suppress(OSError):  # what was still to be written to it
                    file.close()

    def _kill(self) -> None:
        for how in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, how)
                self.process.wait(GRACE)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        self.process.poll()


def run(command: Sequence[str], env: Mapping[str, str], cwd: Path, limit: float) -> Outcome:
    """Run a program to its end or its limit."""
    return Job(command, env, cwd).wait(limit)


class Answerer:
    """A program that answers a line on its stdin by a line of JSON."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        self.job = Job(command, env, cwd, asked=True)
        self._rest = b""

    def answer(self, limit: float) -> dict[str, Any] | None:
        """Its next JSON object; None if none comes in time or it has ended."""
        until = time.monotonic() + limit
        out = self.job.process.stdout
        assert out is not None
        while True:
            line, cut, rest = self._rest.partition(b"\n")
            if cut:
                self._rest = rest
                if (found := as_object(line.decode(errors="replace"))) is not None:
                    return found
                continue
            if not select.select([out], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            more = os.read(out.fileno(), 1 << 16)
            if not more:
                return None
            self._rest += more

    def ask(self, count: int, limit: float) -> dict[str, Any] | None:
        """The answer to a number."""
        assert self.job.process.stdin is not None
        try:
            self.job.process.stdin.write(f"{count}\n".encode())
            self.job.process.stdin.flush()
        except OSError:
            return None
        return self.answer(limit)

    def close(self, limit: float) -> tuple[dict[str, Any] | None, Outcome]:
        """(its last answer, how it ended)."""
        assert self.job.process.stdin is not None
        with contextlib.suppress(OSError):
            self.job.process.stdin.close()
        last = self.answer(limit)
        return last, self.job.wait(min(limit, GRACE))


def text(file: IO[bytes]) -> str:
    """The whole text of an output file."""
    file.seek(0)
    return file.read().decode(errors="replace")
