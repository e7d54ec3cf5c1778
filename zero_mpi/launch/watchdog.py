"""Watchdog that ends a job without progress and prints the state of each rank.

The main thread names its work (`beat`), a `Meter` records waits for other ranks, and `comm.guarded` records
collectives. A thread watches these records. A second thread ends the job some seconds later if the first
thread cannot; it uses no files, because file systems may hang too.

Ranks without progress exchange their states through small files in a shared folder, because a rank inside the
MPI library cannot answer messages. A rank that has waited for a while starts a roll call: it signs, that is,
writes its state. Other waiting ranks then also sign, and the lowest rank that signed compares all states. If
two ranks have started different collectives with the same number, or a rank has ended before a collective
that another rank has started, the wait cannot end (`find_deadlock`), and one rank prints that and ends the
job. Otherwise, after the limit, a rank without progress prints the report for all. A rank that was stopped or
whose host is lost, has not signed, so the report names it. The times in the states are corrected by the file
system's clock, because the clocks of hosts differ. A file's name contains a digest of its job.
"""

import contextlib
import faulthandler
import json
import math
import os
import platform
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, NoReturn

from zero_mpi.cli.text import ranks as named
from zero_mpi.comm.agree import odd_one
from zero_mpi.comm.base import Comm
from zero_mpi.comm.guarded import Started, records
from zero_mpi.comm.meter import collective, meters
from zero_mpi.files.foreign import shown
from zero_mpi.files.open import read_file
from zero_mpi.files.parse import parse_json
from zero_mpi.launch.ending import DRAIN, FAILED, end_surely, say

STATUS = 86  # exit status of a job that was ended for lack of progress
POLL = 0.5  # seconds between checks
GRACE = 5.0  # seconds past the limit after which a rank ends the job without a report
CALL, JOIN = 5.0, 0.5  # seconds of waiting after which a rank starts a roll call or joins another rank's
MOST_PAUSE = 60.0  # maximum seconds between comparisons
SUSPENDED = 2.0  # seconds (at most half the limit) by which a check is late if the process was stopped
WATCHERS = (__file__, " in _renew")  # " in _renew": threads that renew status.json and the lock
FOLDER = ".ranks"
MOST = 1 << 22  # maximum size of a signed file in bytes
STACKS = 4  # maximum number of ranks whose stacks are shown
Table = Mapping[int, Mapping[int, str]]  # rank -> number -> text of the collectives on a communicator


@dataclass(frozen=True)
class RankState:
    """State of a rank, which it writes for the other ranks."""

    doing: str  # work of its main thread, such as "step 3"
    waits: str  # the collective in which the rank waits; empty: none
    last: str  # the last collective that the rank has completed
    seconds: float  # time since the last change of `doing`, `waits` or `last`
    stacks: str = ""  # stacks of its threads
    started: Sequence[Sequence[Started]] = ()  # the last collectives that it has started, by communicator
    ended: int | None = None  # exit status, if the rank will start no more collectives

    def texts(self, comm: int) -> dict[int, str]:
        """Return number -> text of the last collectives that the rank has started on communicator `comm`."""
        calls = self.started[comm] if comm < len(self.started) else ()
        return {call.number: call.text for call in calls}

    @property
    def place(self) -> str:
        """Text with the rank's work and collective, which is equal for ranks at the same point."""
        if self.waits:
            return f"{self.doing}, waiting in {self.waits}"
        return f"{self.doing}, in no collective" + (f" since it left {self.last}" if self.last else "")


class RankReports:
    """A rank's access to the folder of a job's reports. job: text that identifies the job. Raises OSError."""

    def __init__(self, out: Path, rank: int, job: str, folder: str = FOLDER) -> None:
        self._folder = out / folder
        self._job = sha256(job.encode()).hexdigest()[:12]
        self._file = self._folder / f"{self._job}-{rank:05d}"
        self._out = os.stat(out)

    def is_on(self) -> bool:
        return self._folder.exists()

    def sign(self, state: RankState) -> None:
        if not os.path.samestat(os.stat(self._folder.parent), self._out):
            raise FileNotFoundError(self._folder.parent)  # the path now names another folder
        self._folder.mkdir(mode=0o700, exist_ok=True)
        partial = self._folder / f".{self._file.name}"
        partial.write_text(json.dumps(asdict(state)))
        partial.replace(self._file)

    def leave(self) -> None:
        """Remove this rank's file, because it makes progress; the last rank to leave removes the folder."""
        with contextlib.suppress(OSError):  # fails while other ranks have files in the folder
            self._file.unlink(missing_ok=True)
            self._folder.rmdir()

    def claim(self) -> bool:
        """Return True if this rank prints the report for all, as the first signed rank that calls this."""
        with contextlib.suppress(FileExistsError, FileNotFoundError):  # another rank prints, or has printed
            (self._folder / f"{self._job}-speaker").touch(exist_ok=False)
            return True
        return False

    def _paths(self) -> list[Path]:
        return sorted(self._folder.glob(f"{self._job}-[0-9]*"))

    def is_first(self) -> bool:
        return self._paths()[:1] == [self._file]

    def read(self) -> dict[int, RankState]:
        states, now = dict[int, RankState](), 0.0
        for path in self._paths():
            with contextlib.suppress(OSError, ValueError, TypeError, LookupError):  # file removed meanwhile
                now = now or self._file.stat().st_mtime
                state = parse_json(read_file(path, MOST))
                state["started"] = [[Started(*call) for call in calls] for calls in state["started"]]
                state["seconds"] += max(0.0, now - path.stat().st_mtime)
                states[int(path.name.split("-")[1])] = RankState(**state)
        return states

    def clear(self) -> None:
        """Remove the folder, even if it belongs to another job."""
        shutil.rmtree(self._folder, ignore_errors=True)


# -------------------------------------------------------------------------- waits that cannot end


class Deadlock(NamedTuple):
    """Reason why a wait cannot end, and the exit status of the job."""

    reason: str
    status: int = FAILED


def find_deadlock(states: Mapping[int, RankState]) -> Deadlock | None:
    """Return why the waits in these states cannot end; None if they may end."""
    count = max((len(state.started) for state in states.values()), default=0)
    tables = [{rank: state.texts(comm) for rank, state in states.items()} for comm in range(count)]
    return find_difference(tables) or find_absence(states, tables)


def find_difference(tables: Sequence[Table]) -> Deadlock | None:
    """Find ranks whose collectives of the same number differ."""
    for table in tables:
        for number in sorted({number for texts in table.values() for number in texts}):
            calls = {rank: texts[number] for rank, texts in table.items() if number in texts}
            odd = odd_one(list(calls.values()))
            if odd is not None:
                rank, usual = list(calls)[odd[0]], odd[1]
                majority = named([peer for peer in calls if calls[peer] == usual])
                return Deadlock(
                    f"the ranks start different collectives: number {number} (from 0) is "
                    f"{shown(calls[rank])} on rank {rank} and {shown(usual)} on {majority}; all ranks must "
                    "start the same collectives in the same order"
                )
    return None


def find_absence(states: Mapping[int, RankState], tables: Sequence[Table]) -> Deadlock | None:
    """Find a rank, first a failed one, that ended before a collective that other ranks have started."""
    statuses = {rank: state.ended for rank, state in sorted(states.items()) if state.ended is not None}
    for rank in sorted(statuses, key=lambda rank: not statuses[rank]):
        for table in tables:
            number = max(table[rank], default=-1) + 1
            waiting = [r for r in states if r not in statuses and max(table[r], default=-1) >= number]
            if waiting:
                text = shown(table[min(waiting)].get(number, f"collective {number}"))
                wait = "wait" if len(waiting) > 1 else "waits"
                return Deadlock(
                    f"rank {rank} has ended with exit status {statuses[rank]}, while {named(waiting)} {wait} "
                    f"for it in {text}",
                    statuses[rank] or FAILED,
                )
    return None


# ------------------------------------------------------------------------------------------ messages


def report(states: Mapping[int, RankState], places: Sequence[str]) -> list[str]:
    """Return lines with the states of all ranks, beginning with the ranks that others wait for.

    places: process and host of each rank
    """

    def placed(ranks: Sequence[int]) -> str:
        return named(ranks) + (f" ({places[ranks[0]]})" if len(ranks) == 1 else "")

    missing = [rank for rank in range(len(places)) if rank not in states]
    lines = [f"no sign of life from {placed(missing)}: stopped, ended or cut off"] if missing else []
    for group in grouped(states):
        ages = sorted(states[rank].seconds for rank in group)
        spread = f"{ages[0]:.1f}" + (f" to {ages[-1]:.1f}" if len(group) > 1 else "")
        lines.append(f"{placed(group)}: {states[group[0]].place}, for {spread} s")
    return lines


def shown_stacks(states: Mapping[int, RankState]) -> list[str]:
    ranks = [group[0] for group in grouped(states)[:STACKS]]
    return [f"stacks of {named([rank])}:\n{states[rank].stacks.rstrip()}" for rank in ranks]


def grouped(states: Mapping[int, RankState]) -> list[list[int]]:
    """Return groups of ranks at the same point: groups in no collective first, then by ascending size."""
    groups = defaultdict[str, list[int]](list)
    for rank in sorted(states):
        groups[states[rank].place].append(rank)
    return sorted(groups.values(), key=lambda group: (bool(states[group[0]].waits), len(group)))


def waits() -> bool:
    """Return True if a thread of this process waits for other ranks."""
    return any(meter.waits for meter in meters())


def stacks() -> str:
    """Return the stacks of this process's threads, without the threads of WATCHERS."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        threads = file.read().decode(errors="replace").split("\n\n")
    return "\n\n".join(thread for thread in threads if not any(name in thread for name in WATCHERS))


# ------------------------------------------------------------------------------------- the threads


class Watchdog:
    """Threads that watch the progress of this process; `limit` in seconds, 0: no limit.

    `kill`: function that ends all ranks with an exit status.
    `only_waits`: only a wait for other ranks counts as lack of progress, because the main thread does not
    name its work. The process still joins the roll calls of other ranks.
    """

    def __init__(
        self, rank: int, limit: float, kill: Callable[[int], object], *, only_waits: bool = False
    ) -> None:
        self.rank, self.limit, self.only_waits = rank, limit or math.inf, only_waits
        self._work, self._work_start = "start", time.perf_counter()
        self._reports: RankReports | None = None
        self._places: Sequence[str] = []
        self._kill = kill
        self._sign_time: float | None = None  # the value of `_last_change` when this rank signed
        self._pause, self._compares_at = POLL / 2, 0.0  # seconds between comparisons, time of the next
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=run, name=f"zero_mpi {name}", daemon=True)
            for run, name in ((self._watch, "watchdog"), (self._last_resort, "last resort"))
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(DRAIN)  # limited, as the thread may hang in a file system
        if self._sign_time is not None and self._reports is not None:
            self._reports.leave()

    def gather(
        self,
        out: Path,
        comm: Comm,
        folder: str = FOLDER,
        at_end: Callable[[int, str], None] = lambda *end: None,
    ) -> None:
        """Make the ranks exchange states from now on, through a folder in `out`. Collective.

        `at_end` is called with status and reason when this rank ends the job.
        """
        self._places = comm.allgather_object(f"process {os.getpid()} on {platform.node()}")
        job = comm.broadcast_object(f"{self._places[0]}, {time.time_ns()}")
        self._at_end, self._reports = at_end, RankReports(out, comm.rank, job, folder)
        if comm.rank == 0:
            self._reports.clear()  # files of a job that was killed during a roll call

    def clear(self) -> None:
        if self._reports is not None:
            self._reports.clear()

    def beat(self, work: str) -> None:
        self._work, self._work_start = work, time.perf_counter()

    @property
    def _last_change(self) -> float:
        return max([self._work_start, *(meter.changed for meter in meters())])

    @property
    def _counts(self) -> bool:
        """Return True if time without change counts as lack of progress; in a script, only during a wait."""
        return not self.only_waits or (waits() and records.ended is None)

    def standing(self, with_stacks: bool = True) -> RankState:
        by_age = sorted(meters(), key=lambda meter: meter.changed)
        history = [collective(meter.call) for meter in by_age if not meter.waits and any(meter.call)]
        return RankState(
            self._work,
            " and ".join(collective(meter.call) for meter in by_age if meter.waits),
            history[-1] if history else "",
            time.perf_counter() - self._last_change,
            stacks() if with_stacks else "",
            [list(record) for record in list(records.of_comms)],
            records.ended,
        )

    # --------------------------------------------------------------------------- with the other ranks

    def _watch(self) -> None:
        before = time.perf_counter()
        while not self._stop.wait(interval := min(POLL, self.limit / 16)):
            now = time.perf_counter()
            if now - before > interval + min(SUSPENDED, self.limit / 2):
                self._work_start = now  # the process was stopped, which is no lack of progress
            before, changed = now, self._last_change
            with contextlib.suppress(OSError):  # if files fail, the second thread ends the job
                if self._counts and now - changed > self.limit:
                    self._speak(changed, now - changed)
                if self._reports is not None:
                    self._answer(self._reports, changed, now - changed)

    def _answer(self, reports: RankReports, changed: float, age: float) -> None:
        """Sign or leave the roll call, then compare the states of all ranks that have signed."""
        if self._sign_time not in (None, changed):
            self._sign_time = None
            reports.leave()
        if self._sign_time is None and self._is_due(reports, age):
            self._sign(reports, changed)
        now = time.perf_counter()
        if self._sign_time is not None and now >= self._compares_at:
            self._pause = min(2 * self._pause, MOST_PAUSE)
            self._compares_at = now + self._pause
            deadlock = find_deadlock(reports.read()) if reports.is_first() else None  # only one rank compares
            if deadlock is not None:
                self._speak(changed, age, deadlock)

    def _is_due(self, reports: RankReports, age: float) -> bool:
        """Return True if this rank must sign: sooner if it waits or has ended, or if others have signed."""
        join, call = min(JOIN, self.limit / 8), min(CALL, self.limit / 2)
        if records.ended is not None:
            return age > join
        if waits():
            return age > call or (age > join and reports.is_on())
        return (self._counts and age > self.limit / 2) or (age > call and reports.is_on())

    def _sign(self, reports: RankReports, changed: float) -> None:
        reports.sign(self.standing())
        self._sign_time, self._pause, self._compares_at = changed, POLL / 2, 0.0

    def _speak(self, changed: float, age: float, deadlock: Deadlock | None = None) -> None:
        """Print the states of all ranks, unless another rank prints them, and end the job."""
        reports = self._reports
        if reports is None:
            self._end(age)
        if self._sign_time != changed:
            self._sign(reports, changed)
        if not reports.claim():
            time.sleep(GRACE)  # the rank that prints is about to end the job
            self._end(age)
        if deadlock is not None:
            time.sleep(min(POLL, self.limit / 8))  # gives other ranks time to sign
        self._sign(reports, changed)
        states = reports.read()
        rows = report(states, self._places)
        cause = (
            find_deadlock(states) or deadlock or Deadlock(f"no progress for {age:.1f} s: {rows[0]}", STATUS)
        )
        lines = [f"zero_mpi: {line}" for line in (f"{cause.reason}; ending the job", *rows)]
        say("\n".join(lines + shown_stacks(states)))
        self._at_end(cause.status, cause.reason)
        time.sleep(DRAIN)
        reports.clear()
        end_surely(self._kill, cause.status)

    # ----------------------------------------------------------------------------------- last resort

    def _last_resort(self) -> None:
        is_late = False
        while not self._stop.wait(POLL):
            age = time.perf_counter() - self._last_change
            if is_late and age > self.limit + GRACE:
                self._end(age)
            # Check twice: after a stop of the process, the first thread must run before this check counts.
            is_late = self._counts and age > self.limit + GRACE

    def _end(self, age: float) -> NoReturn:
        """End the job without using files."""
        place = self.standing(with_stacks=False).place
        say(f"zero_mpi: rank {self.rank}: no progress for {age:.1f} s: {place}; ending the job")
        faulthandler.dump_traceback(file=2, all_threads=True)
        time.sleep(DRAIN)
        end_surely(self._kill, STATUS)
