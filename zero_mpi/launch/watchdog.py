"""Ends a job that has stopped getting anywhere, and says where each rank stands.

The main thread names what it does (`beat`), every wait for other ranks leaves its name and time in a `Meter`,
and collectives leave a record. One thread looks at all of them. A rank that has waited for some seconds signs
the roll call and compares what it has started with the others (`hang_report`): where no patience helps, it
says so and ends the job. Otherwise a rank that stands still past the limit speaks for all. Files may hang as
well: a second thread, which uses none, ends the job some seconds later, whatever the first one does.
"""

from __future__ import annotations

import faulthandler
import math
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from zero_mpi.comm.guarded import records
from zero_mpi.comm.meter import collective, meters
from zero_mpi.launch.ending import DRAIN, end_surely, say
from zero_mpi.launch.hang_report import RankReports, RankState, Vain, in_vain, report, shown_stacks, verdict

STATUS = 86  # of a job that was ended for standing still
LOOK = 0.5  # seconds between looks
GRACE = 5.0  # seconds past the limit after which a rank ends itself, without a word about the others
CALL, JOIN = 5.0, 0.5  # seconds of a wait after which a rank calls the roll, and joins one
MOST_PAUSE = 60.0  # seconds between two comparisons, at most: thousands of ranks may wait in one folder
SUSPENDED = 2.0  # seconds (at most half the limit) that a look is late by if the process was stopped
WATCHERS = (__file__, " in _renew")  # the second is that of status.json and of the lock


class Watchdog:
    """Watches this process; `limit` in seconds, 0 for none.

    `kill`: called with the status with which all ranks are to end.
    `only_waits`: where nothing but a wait for other ranks counts as standing still, for the main thread does
    not say what it is at. It answers the others' roll call all the same.
    """

    def __init__(
        self, rank: int, limit: float, kill: Callable[[int], object], *, only_waits: bool = False
    ) -> None:
        self.rank, self.limit, self.only_waits = rank, limit or math.inf, only_waits
        self._doing, self._since = "start", time.perf_counter()
        self._reports: RankReports | None = None
        self._places: Sequence[str] = []
        self._tell: Callable[[int, str], None] = lambda status, reason: None
        self._kill = kill
        self._signed: float | None = None  # what `_changed` was when this rank signed
        self._pause, self._compares_at = CALL / 2, 0.0  # of comparisons: who signs later compares as well
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=run, name=f"zero_mpi {name}", daemon=True)
            for run, name in ((self._watch, "watchdog"), (self._last_resort, "last resort"))
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Watch no more, for what was watched is done; leave nothing behind."""
        self._over.set()
        for thread in self._threads:
            thread.join(DRAIN)  # it may be at a file system that hangs
        if self._signed is not None and self._reports is not None:
            self._reports.leave()

    def gather(
        self,
        reports: RankReports,
        places: Sequence[str],
        tell: Callable[[int, str], None] = lambda status, reason: None,
    ) -> None:
        """Let the ranks know of each other from now on.

        `places`: process and host of each rank. `tell` is given status and reason when this one ends the job.
        """
        self._places, self._tell, self._reports = places, tell, reports

    def beat(self, what: str) -> None:
        """The main thread begins `what`."""
        self._doing, self._since = what, time.perf_counter()

    @property
    def _changed(self) -> float:
        """When anything moved last in this process."""
        return max([self._since, *(meter.changed for meter in meters())])

    @property
    def _waits(self) -> bool:
        return any(meter.waits for meter in meters())

    @property
    def _counts(self) -> bool:
        """Whether time that passes now counts: in a script, a wait before its end."""
        return not self.only_waits or (self._waits and records.ended is None)

    def standing(self, with_stacks: bool = True) -> RankState:
        """Where this process stands."""
        by_age = sorted(meters(), key=lambda meter: meter.changed)
        waits = " and ".join(collective(meter.what) for meter in by_age if meter.waits)
        left = [collective(meter.what) for meter in by_age if not meter.waits and any(meter.what)]
        return RankState(
            self._doing,
            waits,
            left[-1] if left else "",
            time.perf_counter() - self._changed,
            stacks() if with_stacks else "",
            [list(record) for record in list(records.of_comms)],
            records.ended,
        )

    # --------------------------------------------------------------------------- with the other ranks

    def _watch(self) -> None:
        before = time.perf_counter()
        while not self._over.wait(look := min(LOOK, self.limit / 16)):
            now = time.perf_counter()
            if now - before > look + min(SUSPENDED, self.limit / 2):
                self._since = now  # the whole process was stopped: nobody in it is to blame
            before, changed = now, self._changed
            try:
                if self._counts and now - changed > self.limit:
                    self._speak(changed, now - changed)
                if self._reports is not None:
                    self._answer(self._reports, changed, now - changed)
            except OSError:  # no files: the last resort needs none
                continue

    def _answer(self, reports: RankReports, changed: float, age: float) -> None:
        """Sign or leave the roll call, and compare this rank with others who have signed."""
        if self._signed not in (None, changed):
            self._signed = None
            reports.leave()
        if self._signed is None and self._is_due(reports, age):
            self._sign(reports, changed)
        now = time.perf_counter()
        if self._signed is not None and now >= self._compares_at:
            self._pause = min(2 * self._pause, MOST_PAUSE)
            self._compares_at = now + self._pause
            vain = in_vain({**reports.read(few=True), self.rank: self.standing(with_stacks=False)})
            if vain is not None:
                self._speak(changed, age, vain)

    def _is_due(self, reports: RankReports, age: float) -> bool:
        """Whether this rank is to sign: it stands still for long, or for a moment and others have signed."""
        soon, late = min(JOIN, self.limit / 8), min(CALL, self.limit / 2)
        if records.ended is not None:
            return age > soon
        if self._waits:
            return age > late or (age > soon and reports.is_on())
        return (self._counts and age > self.limit / 2) or (age > late and reports.is_on())

    def _sign(self, reports: RankReports, changed: float) -> None:
        reports.sign(self.standing())
        self._signed, self._pause, self._compares_at = changed, CALL / 2, 0.0

    def _speak(self, changed: float, age: float, vain: Vain | None = None) -> None:
        """Tell where all ranks stand and end the job, unless another rank does."""
        reports = self._reports
        if reports is None:
            self._end(age)
        if self._signed != changed:
            self._sign(reports, changed)
        if not reports.claim():
            time.sleep(GRACE)  # the one that speaks is about to end the job
            self._end(age)
        if vain is not None:
            time.sleep(min(LOOK, self.limit / 8))  # so that who comes to the same point may be named too
        self._sign(reports, changed)
        states = reports.read()
        found = in_vain(states) or vain
        found = found or Vain(f"no progress for {age:.1f} s: {verdict(states, len(self._places))}", STATUS)
        lines = [f"{found.reason}; ending the job", *report(states, self._places)]
        said = "".join(f"zero_mpi: {line}\n" for line in lines) + shown_stacks(states)
        say(said.removesuffix("\n"))
        self._tell(found.status, found.reason)
        time.sleep(DRAIN)
        reports.clear()
        end_surely(self._kill, found.status)

    # ----------------------------------------------------------------------------------------- alone

    def _last_resort(self) -> None:
        late = False
        while not self._over.wait(LOOK):
            age = time.perf_counter() - self._changed
            if late and age > self.limit + GRACE:
                self._end(age)
            # Twice: after a stop of the process the other thread looks first.
            late = self._counts and age > self.limit + GRACE

    def _end(self, age: float) -> NoReturn:
        """End this process, without files."""
        place = self.standing(with_stacks=False).place
        say(f"zero_mpi: rank {self.rank}: no progress for {age:.1f} s: {place}; ending the job")
        faulthandler.dump_traceback(file=2, all_threads=True)
        time.sleep(DRAIN)
        end_surely(self._kill, STATUS)


def stacks() -> str:
    """Where the threads of this process are, but for those that only watch."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        threads = file.read().decode(errors="replace").split("\n\n")
    return "\n\n".join(thread for thread in threads if not any(name in thread for name in WATCHERS))
