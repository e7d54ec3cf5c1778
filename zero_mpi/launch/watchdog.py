"""Ends a job that has stopped getting anywhere, and says where each rank stands.

The main thread names what it does (`beat`), and every wait for other ranks leaves its name and time in a
`Meter`. One thread looks at both. Where nothing changes it signs the roll call; past the limit it speaks for
all ranks, if no other does, and ends the job. Files may hang as well: a second thread, which uses none, ends
the job some seconds later, whatever the first one does.
"""

from __future__ import annotations

import faulthandler
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from zero_mpi.comm.meter import collective, meters
from zero_mpi.launch.ending import DRAIN, end_surely, say
from zero_mpi.launch.hang_report import RankReports, RankState, report, shown_stacks, verdict

STATUS = 86  # of a job that was ended for standing still
LOOK = 0.5  # seconds between looks
GRACE = 5.0  # seconds past the limit after which a rank ends itself, without a word about the others
SIGNS, JOINS = 1 / 2, 1 / 8  # parts of the limit: when a rank calls the roll, and when it joins one
SUSPENDED = 2.0  # seconds (at most half the limit) that a look is late by if the process was stopped
WATCHERS = (__file__, " in _renew", "/lookout.py")  # the second is that of status.json


class Watchdog:
    """Watches this process; `limit` in seconds, 0 for never.

    `kill`: called with the status with which all ranks are to end.
    `only_waits`: where nothing but a wait for other ranks counts as standing still, for the main thread does
    not say what it is at. It answers the others' roll call all the same.
    """

    def __init__(
        self, rank: int, limit: float, kill: Callable[[int], object], *, only_waits: bool = False
    ) -> None:
        self.rank, self.limit, self.only_waits = rank, limit, only_waits
        self._doing, self._since = "start", time.perf_counter()
        self._reports: RankReports | None = None
        self._places: Sequence[str] = []
        self._tell: Callable[[str], None] = lambda reason: None
        self._kill = kill
        self._signed: float | None = None  # what `_changed` was when this rank signed
        self._over = threading.Event()
        self._joins_at_once = False  # it has signed, got on a little, and others still stand
        if limit > 0:
            for run, name in ((self._watch, "watchdog"), (self._last_resort, "last resort")):
                threading.Thread(target=run, name=f"zero_mpi {name}", daemon=True).start()

    def stop(self) -> None:
        """Watch no more: what was watched is done."""
        self._over.set()

    def gather(
        self,
        reports: RankReports,
        places: Sequence[str],
        tell: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Let the ranks know of each other from now on.

        `places`: process and host of each rank. `tell` is given the reason when this one ends the job.
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
    def _counts(self) -> bool:
        """Whether time that passes now counts."""
        return not self.only_waits or any(meter.waits for meter in meters())

    def standing(self, with_stacks: bool = True) -> RankState:
        """Where this process stands."""
        by_age = sorted(meters(), key=lambda meter: meter.changed)
        waits = " and ".join(collective(meter.what) for meter in by_age if meter.waits)
        left = [collective(meter.what) for meter in by_age if not meter.waits and any(meter.what)]
        age = time.perf_counter() - self._changed
        return RankState(self._doing, waits, left[-1] if left else "", age, stacks() if with_stacks else "")

    # --------------------------------------------------------------------------- with the other ranks

    def _watch(self) -> None:
        before = time.perf_counter()
        while True:
            look = min(LOOK, self.limit / 16)
            if self._over.wait(look):
                return
            now = time.perf_counter()
            if now - before > look + min(SUSPENDED, self.limit / 2):
                self._since = now  # the whole process was stopped: nobody in it is to blame
            before, changed = now, self._changed
            try:
                if self._counts and now - changed > self.limit:
                    self._speak(changed, now - changed)
                self._answer(changed, now - changed, look)
            except OSError:  # no files: the last resort needs none
                continue

    def _answer(self, changed: float, age: float, look: float) -> None:
        """Sign or leave the roll call."""
        if self._reports is None:
            return
        if self._signed is not None and self._signed != changed:
            self._signed, self._joins_at_once = None, True
            self._reports.leave()
        elif self._signed is None and self._counts and age > self.limit * SIGNS:
            self._sign(changed)
        elif self._signed is None and age > (2 * look if self._joins_at_once else self.limit * JOINS):
            if self._reports.is_on():
                self._sign(changed)
            self._joins_at_once = False

    def _sign(self, changed: float) -> None:
        assert self._reports is not None
        self._reports.sign(self.standing())
        self._signed = changed

    def _speak(self, changed: float, age: float) -> None:
        """Tell where all ranks stand and end the job, unless another rank does."""
        if self._reports is None:
            self._end(age)
        if self._signed != changed:
            self._sign(changed)
        if not self._reports.claim():
            time.sleep(GRACE)  # the one that speaks is about to end the job
            self._end(age)
        self._sign(changed)
        states = self._reports.read()
        reason = f"no progress for {age:.1f} s: {verdict(states, len(self._places))}"
        lines = [f"{reason}; ending the job", *report(states, self._places)]
        said = "".join(f"zero_mpi: {line}\n" for line in lines) + shown_stacks(states)
        say(said.removesuffix("\n"))
        self._tell(reason)
        self._reports.clear()
        time.sleep(DRAIN)
        end_surely(self._kill, STATUS)

    # ----------------------------------------------------------------------------------------- alone

    def _last_resort(self) -> None:
        late = False
        while not self._over.wait(LOOK):
            age = time.perf_counter() - self._changed
            if late and age > self.limit + GRACE:
                self._end(age)
            late = (
                self._counts and age > self.limit + GRACE
            )  # twice: after a stop of the process the other thread looks first

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
