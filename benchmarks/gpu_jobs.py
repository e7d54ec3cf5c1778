"""Runs programs with a time limit, and writes a report on their results.

Each program leads a process group. At its limit, the program is killed with all processes of the group; what
it printed before still counts. The report is written after every part, as JSON and as Markdown.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

TIMED_OUT = 124
GRACE = 3.0  # seconds that a program has to end by itself before it is killed
LOOK = 0.01  # seconds between two checks for an answer
SHOWN = 1500  # maximum number of characters that the report shows from the end of a failed program's output
PASSED, FAILED, NOT_RUN = "passed", "FAILED", "not run"


@dataclass(frozen=True)
class Outcome:
    """Exit status, output and duration of a program that has ended."""

    status: int
    printed: str
    errors: str
    seconds: float

    @property
    def objects(self) -> list[dict[str, Any]]:
        """Return the printed lines that are JSON objects."""
        return [found for line in self.printed.splitlines() if (found := as_object(line)) is not None]

    @property
    def problem(self) -> str:
        """Return how a failed program ended, with its last output; "" if it succeeded."""
        if self.status == 0:
            return ""
        how = "ended after its time limit" if self.status == TIMED_OUT else f"status {self.status}"
        said = (self.errors.strip() or self.printed.strip())[-SHOWN:]
        return f"{how}: {said}" if said else how


def as_object(line: str) -> dict[str, Any] | None:
    """Return the JSON object in a line, or None if the line is not a JSON object."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


class Job:
    """A running program. It may answer each number on its stdin with a line of JSON."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        self.command, self.begun = list(command), time.monotonic()
        self._printed, self._errors = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115 (kept open)
        self._read = 0  # number of bytes of the output read so far
        self.process = subprocess.Popen(
            self.command,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=self._printed,
            stderr=self._errors,
            start_new_session=True,
        )

    def answer(self, limit: float) -> dict[str, Any] | None:
        """Return the next JSON object that the program prints; None if it has ended or is too slow."""
        until = time.monotonic() + limit
        while True:
            ended = self.process.poll() is not None  # checked before reading, so that no output is missed
            line, cut, _ = os.pread(self._printed.fileno(), 1 << 20, self._read).partition(b"\n")
            if cut:
                self._read += len(line) + 1
                if (found := as_object(line.decode(errors="replace"))) is not None:
                    return found
            elif ended or time.monotonic() > until:
                return None
            else:
                time.sleep(LOOK)

    def ask(self, count: int, limit: float) -> dict[str, Any] | None:
        """Send a number to the program. Return its answer."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{count}\n".encode())
            self.process.stdin.flush()
        except OSError:
            return None
        return self.answer(limit)

    def close(self, limit: float) -> tuple[dict[str, Any] | None, Outcome]:
        """Close the program's stdin. Return its last answer and its outcome."""
        self._close_stdin()
        last = self.answer(limit)
        return last, self.wait(min(limit, GRACE))

    def wait(self, limit: float) -> Outcome:
        """Wait at most `limit` seconds, then kill the program. Return its outcome."""
        self._close_stdin()
        try:
            status = self.process.wait(max(0.0, limit))
        except subprocess.TimeoutExpired:
            status = TIMED_OUT
        self._kill()
        outcome = Outcome(status, text(self._printed), text(self._errors), time.monotonic() - self.begun)
        self.end()
        return outcome

    def end(self) -> None:
        """Kill the program and its child processes, and close its output files."""
        self._close_stdin()
        self._kill()
        self._printed.close()
        self._errors.close()

    def _close_stdin(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # the program may have ended before it read its input
            self.process.stdin.close()

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
    """Run a program until it ends or reaches its limit. Return its outcome."""
    return Job(command, env, cwd).wait(limit)


def text(file: IO[bytes]) -> str:
    """Return the content of an output file as text."""
    file.seek(0)
    return file.read().decode(errors="replace")


# -------------------------------------------------------------------------------------------------- report


@dataclass(frozen=True)
class Verdict:
    """Result of one check. ok: whether it passed; None if it could not run."""

    what: str
    wanted: str
    found: str
    ok: bool | None


@dataclass
class Section:
    """Results of a part of the check.

    tables: title -> rows, each of them column -> value; problems: how programs failed, with their output
    """

    name: str
    about: str
    seconds: float = 0.0
    verdicts: list[Verdict] = field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        """Return whether the part passed, failed, or was not run."""
        outcomes = [verdict.ok for verdict in self.verdicts]
        if False in outcomes or self.problems:
            return FAILED
        return PASSED if True in outcomes else NOT_RUN

    def judge(self, what: str, wanted: str, found: str, ok: bool | None) -> None:
        """Add the result of a check."""
        self.verdicts.append(Verdict(what, wanted, found, ok))

    def not_run(self, why: str) -> None:
        """Add a result that says that this part was not run."""
        self.judge(self.about, "to be seen", f"not run: {why}", None)


@dataclass
class Report:
    """All sections of a report, and facts about the machine."""

    title: str
    notes: list[str]
    sections: list[Section] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Return whether all checks passed. A check that was not run counts as failed."""
        verdicts = [verdict for section in self.sections for verdict in section.verdicts]
        return all(section.state == PASSED for section in self.sections) and all(v.ok for v in verdicts)

    def write(self, folder: Path) -> None:
        """Write `report.json` and `report.md`."""
        about = {"title": self.title, "notes": self.notes, "passed": self.passed}
        sections = [asdict(section) | {"state": section.state} for section in self.sections]
        found = json.dumps(about | {"sections": sections}, indent=1)
        (folder / "report.json").write_text(found + "\n")
        (folder / "report.md").write_text("\n".join(self.lines()) + "\n")

    def lines(self) -> Iterator[str]:
        """Yield the report as Markdown: all verdicts first, then the tables of each section."""
        yield from (f"# {self.title}", "", *(f"- {note}" for note in self.notes))
        yield from ("", "| part | seconds | | what | wanted | found |", "|---|---|---|---|---|---|")
        for section in self.sections:
            for verdict in section.verdicts:
                mark = {True: "ok", False: "**FAILED**", None: "-"}[verdict.ok]
                cells = (section.name, f"{section.seconds:.0f}", mark, *map(cell, asdict(verdict).values()))
                yield "| " + " | ".join(cells[:6]) + " |"
        for section in self.sections:
            yield from ("", f"## {section.name}: {section.state}", "", section.about)
            for title, rows in section.tables.items():
                yield from ("", title, "", *table(rows))
            for problem in section.problems:
                yield from ("", "```", problem, "```")


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a Markdown table. Its columns are those of all rows, in the order in which they first occur."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(cell(row.get(name, "")) for name in columns) + " |"


def cell(value: Any) -> str:
    """Return a value as a cell of a table: a number with four digits, or text without line breaks."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return " ".join(str(value).split()).replace("|", "/")
