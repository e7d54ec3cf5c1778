"""Restart loop: a run is started until it is done, has saved, or cannot get further.

A restart counts against the limit until there is a new checkpoint: then count and pause begin anew,
so a run of weeks may lose a host per day. Pauses double from the first to MOST_PAUSE. Each restart is logged
in a line, and written into the events of the run between two starts.
"""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from zero_mpi.cli.text import duration, few, plural
from zero_mpi.commands.hostfile.host_entries import HostEntry
from zero_mpi.commands.supervise.attempt import Attempt, StopRequest
from zero_mpi.commands.supervise.decision import Ending, RunFacts, failure_status, final_status, fingerprint
from zero_mpi.commands.supervise.host_pool import HostPool, Template, ranks_of
from zero_mpi.launch.ending import FAILED, REQUEUE, say
from zero_mpi.launch.stopping import INTERRUPTED
from zero_mpi.telemetry import events

MOST_PAUSE = 300.0  # seconds
# For Slurm: a step begins though one before it is not over, of which a lost node has a part, for minutes.
BESIDE = {"SLURM_OVERLAP": "1"}
LOOK = 0.1  # seconds between checks for an end of the pause
ORPHANS = 30.0  # seconds for ranks without a launcher to end


class Restarts:
    """Run and its starts. `limits`: the flags of the command; `stop`: the stop signals of this process."""

    def __init__(self, template: Template, pool: HostPool | None, facts: RunFacts, limits: Namespace) -> None:
        self._template, self._pool, self._facts, self._limits = template, pool, facts, limits
        self._first_checkpoint = facts.checkpoint()
        self._failed_before: tuple[object, ...] = ()
        self._count, self._has_started = 0, False
        self.stop = StopRequest()

    def run(self) -> int:
        """Start the run until the end. Return the exit status. Raises UsageError."""
        with tempfile.TemporaryDirectory(prefix="zero_mpi-supervise-") as folder:
            hosts = self._pool.choose() if self._pool else ()
            while True:
                settings = BESIDE if self._has_started else {}
                is_changed = self._facts.checkpoint() not in (self._first_checkpoint, ("", 0))
                template = self._template.resuming() if is_changed else self._template
                ending = Attempt(self._facts, self.stop, self._limits.hang_after).run(
                    template.fill(hosts, Path(folder)), settings
                )
                self._has_started = True
                status = INTERRUPTED if self.stop.at_once else final_status(ending, bool(self.stop.told))
                if status is None and not self._may_start_again(ending, hosts):
                    status = failure_status(ending)
                if status is not None:
                    return status
                found = self._next_hosts(ending)
                if isinstance(found, int):
                    return found
                hosts = found

    def _may_start_again(self, ending: Ending, hosts: Sequence[HostEntry]) -> bool:
        """Return whether another start has a chance; log why not."""
        if ending.progressed:
            self._count = 0
        failed = fingerprint(ending, tuple(host.name for host in hosts))
        is_same = failed == self._failed_before and not ending.progressed
        self._failed_before = failed
        if is_same:
            self._give_up(ending, f"the same failure again after step {ending.step}: {ending.reason}")
        elif self._count >= self._limits.restarts:
            self._give_up(ending, f"{ending.reason}; {self._limits_reached()}")
        return not is_same and self._count < self._limits.restarts

    def _limits_reached(self) -> str:
        return f"{plural(self._limits.restarts, 'restart')} without a new checkpoint"

    def _next_hosts(self, ending: Ending) -> tuple[HostEntry, ...] | int:
        """Return the hosts of the next start, once it is time, or the exit status if there is none."""
        while True:
            self._count += 1
            pause = min(self._limits.backoff * 2 ** min(self._count - 1, 20), MOST_PAUSE)
            number = f"restart {self._count} of {self._limits.restarts}"
            say(
                f"zero_mpi supervise: the run ended after step {ending.step}: {ending.reason}; "
                f"{number} {f'in {duration(pause)}' if pause else 'now'}"
            )
            self._facts.await_release(ORPHANS, lambda: bool(self.stop.told))
            if not self._pause(pause):
                return INTERRUPTED if self.stop.at_once else REQUEUE
            silent = self._pool.silent() if self._pool else []
            hosts = self._pool.choose(silent) if self._pool else ()
            if self._pool is None or len(hosts) >= self._limits.min_hosts:
                self._tell(ending, number, hosts, silent)
                return hosts
            few_left = f"{len(hosts)} of {plural(len(self._pool.hosts), 'host')} answer, --min-hosts "
            ending = Ending(FAILED, {}, f"{few_left}{self._limits.min_hosts}", ending.step)
            if self._count >= self._limits.restarts:
                self._give_up(ending, f"{ending.reason}; {self._limits_reached()}")
                return FAILED

    def _pause(self, seconds: float) -> bool:
        """Wait; return False if this process was asked to stop."""
        until = time.monotonic() + seconds
        while not self.stop.told and time.monotonic() < until:
            time.sleep(min(LOOK, seconds))
        return not self.stop.told

    def _tell(self, ending: Ending, number: str, hosts: Sequence[HostEntry], silent: Sequence[str]) -> None:
        """Log what is started and where, and write it to the events."""
        where, about = "", {}
        if self._pool is not None:
            ranks = ranks_of(hosts)
            names = [host.name for host in hosts]
            where = f" on {plural(len(hosts), 'host')} ({', '.join(few(names))}), {plural(ranks, 'rank')}"
            about = {"hosts": names, "ranks": ranks}
        if silent:
            where += f"; left out (no answer): {', '.join(few(silent))}"
        say(f"zero_mpi supervise: {number} from {self._facts.origin}{where}")
        self._facts.note(
            events.RESTARTED, ending.step, reason=f"{ending.reason}; {number}{where}", silent=silent, **about
        )

    def _give_up(self, ending: Ending, why: str) -> None:
        say(f"zero_mpi supervise: giving up: {why}")
        self._facts.note(events.GAVE_UP, ending.step, reason=why)
