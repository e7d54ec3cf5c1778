"""Command `supervise`: restarts a run until it is done, stops with a checkpoint, or cannot continue.

A restart counts against the limit until there is a new checkpoint, which resets the count and the pause. So a
run of weeks may lose a host per day. Each pause is twice as long as the one before, up to MOST_PAUSE. Each
restart is logged in a line, and written into the events of the run before its next start.
"""

from __future__ import annotations

import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zero_mpi import environment
from zero_mpi.cli.parser import Parser
from zero_mpi.cli.text import few, plural, seconds
from zero_mpi.commands.hostfile import LINES, HostEntry
from zero_mpi.commands.supervise import attempt
from zero_mpi.commands.supervise.attempt import NO_CHECKPOINT, Attempt, Ending, RunFolder, StopRequest
from zero_mpi.commands.supervise.hosts import PLACEHOLDERS, HostPool, Template, find_pool
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import one_line
from zero_mpi.launch.ending import BAD_USAGE, FAILED, REQUEUE, say
from zero_mpi.launch.stopping import INTERRUPTED, leave
from zero_mpi.telemetry import events

BEFORE = "--"  # word between supervise's flags and the command
MOST_PAUSE = 300.0  # maximum seconds before a restart
# Lets a Slurm step start before the previous step ends, because ending takes minutes after a lost node.
OVERLAP = {"SLURM_OVERLAP": "1"}
LOOK = 0.1  # seconds between checks for the end of a pause
ORPHANS = 30.0  # seconds to wait for ranks whose launcher has died
NUMBERS: dict[str, tuple[float, int, str]] = {  # flag -> default, minimum, help
    "--restarts": (10, 0, "maximum number of restarts without a new checkpoint"),
    "--backoff": (5.0, 0, "seconds before the first restart; doubled each time"),
    "--hang-after": (900.0, 0, "seconds without a change in the run folder before a restart; 0: never"),
    "--spare": (0, 0, "number of spare hosts, taken from the end of the list"),
    "--min-hosts": (1, 1, "minimum number of hosts for a restart"),
    "--probe-timeout": (HostPool.timeout, 0, "seconds within which a host must answer"),
}


def make_parser() -> Parser:
    """Return the parser of the flags before the command."""
    parser = Parser(
        prog="zero-mpi supervise",
        usage="%(prog)s [flags] -- COMMAND ...",
        description="Start a run. If a rank or a host dies or hangs, restart it from the newest checkpoint "
        "on the remaining hosts. {hostfile}, {hosts}, {nodes} and {ranks} in the command are filled in at "
        "each start. Exit status: that of the run.",
        epilog="Examples, with one spare host and in a Slurm job:\n\n"
        "  zero-mpi supervise --hostfile hosts --spare 1 -- \\\n"
        "      mpirun -f {hostfile} -n {ranks} python -m zero_mpi.train --out runs/long\n"
        "  zero-mpi supervise -- \\\n"
        "      srun -w {hosts} -N {nodes} -n {ranks} python -m zero_mpi.train",
    )
    add = parser.add_argument
    for name, (default, _, text) in NUMBERS.items():
        add(name, type=type(default), default=default, help=text)
    add("--hostfile", metavar="FILE", help="hosts and ranks (default: from the batch job)")
    add("--for", dest="form", choices=tuple(LINES), default="mpich", help="launcher that reads {hostfile}")
    purpose = "command that exits with 0 if {host} works (default: ssh; in Slurm srun)"
    add("--probe", metavar="COMMAND", help=purpose)
    add("--run", metavar="DIR", help="run folder (default: --out of the command)")
    return parser


def prepare(arguments: Sequence[str]) -> Restarts:
    """Return the loop of restarts that a command line describes. Raise UsageError for invalid flags."""
    boundary = arguments.index(BEFORE) if BEFORE in arguments else len(arguments)
    message = f"expected a command after {BEFORE}: zero-mpi supervise {BEFORE} mpirun ..."
    if boundary == len(arguments) and arguments and not arguments[0].startswith("-"):
        raise UsageError(message)
    options = make_parser().parse_args(arguments[:boundary])
    for flag, (_, bound, _) in NUMBERS.items():
        value = getattr(options, flag[2:].replace("-", "_"))
        if not bound <= value < 1e9:
            raise UsageError(f"{flag} {value:g}: expected a number from {bound} to 1e9")
    template = Template(tuple(arguments[boundary + 1 :]), options.form)
    if not template.words:
        raise UsageError(message)
    if environment.under_launcher():
        raise UsageError("supervise starts the launcher itself: run it without mpirun")
    pool = find_pool(options.hostfile or "", options.probe or "") if template.takes_hosts else None
    folder = RunFolder(Path(options.run) if options.run else template.out() or attempt.NO_FOLDER)
    return Restarts(template, with_spare(pool, options, template), folder, options)


def with_spare(pool: HostPool | None, options: Namespace, template: Template) -> HostPool | None:
    """Return the hosts, with --spare of them in reserve. Raise UsageError if there are too few."""
    if not template.takes_hosts:
        if options.hostfile or options.spare or options.min_hosts > 1:
            flags, names = "--hostfile, --spare and --min-hosts", ", ".join(PLACEHOLDERS)
            example = "mpirun -f {hostfile} -n {ranks} ..."
            raise UsageError(f"{flags}: expected one of {names} in the command: {example}")
        return None
    if pool is None:
        raise UsageError("the command has a placeholder, but the hosts are unknown: add --hostfile FILE")
    if len(pool.hosts) - options.spare < options.min_hosts:
        raise UsageError(
            f"--spare {options.spare}: expected at least --min-hosts {options.min_hosts} of "
            f"{len(pool.hosts)} hosts to remain; list more hosts"
        )
    return replace(pool, spare=options.spare, timeout=options.probe_timeout)


class Restarts:
    """Loop of restarts. `limits` has the values of the flags; `stop` notes stop signals of this process."""

    def __init__(
        self, template: Template, pool: HostPool | None, folder: RunFolder, limits: Namespace
    ) -> None:
        self._template, self._pool, self._folder, self._limits = template, pool, folder, limits
        self._failed_before: tuple[object, ...] = ()
        self._count = 0
        self.stop = StopRequest()

    def run(self) -> int:
        """Restart the run until it is over. Return the exit status. Raise UsageError if a start fails."""
        first, settings = self._folder.checkpoint(), dict[str, str]()
        hosts = self._pool.choose() if self._pool else ()
        with tempfile.TemporaryDirectory(prefix="zero_mpi-supervise-") as place:
            while True:
                is_own = self._folder.checkpoint() not in (first, NO_CHECKPOINT)
                template = self._template.resuming() if is_own else self._template
                start = Attempt(self._folder, self.stop, self._limits.hang_after)
                ending = start.run(template.fill(hosts, Path(place)), settings)
                if self.stop.at_once:
                    return INTERRUPTED
                status = ending.final_status(bool(self.stop.signal_name))
                if status is not None:
                    return status
                if not self._may_start_again(ending, hosts):
                    return ending.failure_status
                outcome = self._next_hosts(ending)
                if isinstance(outcome, int):
                    return outcome
                hosts, settings = outcome, OVERLAP

    def _may_start_again(self, ending: Ending, hosts: Sequence[HostEntry]) -> bool:
        """Return whether another start may succeed. If not, log the reason."""
        if ending.progressed:
            self._count = 0
        fingerprint = ending.fingerprint([host.name for host in hosts])
        is_same = fingerprint == self._failed_before and not ending.progressed
        self._failed_before = fingerprint
        reason = f"the same failure again after step {ending.step}: {ending.reason}" if is_same else ""
        return self._has_restarts(ending, reason)

    def _has_restarts(self, ending: Ending, reason: str = "") -> bool:
        limit = self._limits.restarts
        if not reason and self._count >= limit:
            reason = f"{ending.reason}; {plural(limit, 'restart')} without a new checkpoint"
        if reason:
            say(f"zero_mpi supervise: giving up: {reason}")
            self._folder.note(events.GAVE_UP, ending.step, reason=reason)
        return not reason

    def _next_hosts(self, ending: Ending) -> tuple[HostEntry, ...] | int:
        """Wait for the next start. Return its hosts, or the exit status if there is no next start."""
        while True:
            self._count += 1
            pause = min(self._limits.backoff * 2 ** min(self._count - 1, 20), MOST_PAUSE)
            number = f"restart {self._count} of {self._limits.restarts}"
            say(
                f"zero_mpi supervise: the run ended after step {ending.step}: {ending.reason}; "
                f"{number} {f'in {seconds(pause)}' if pause else 'now'}"
            )
            self._folder.await_release(ORPHANS, lambda: bool(self.stop.signal_name))
            if not self._pause(pause):
                return INTERRUPTED if self.stop.at_once else REQUEUE
            silent = self._pool.silent() if self._pool else []
            hosts = self._pool.choose(silent) if self._pool else ()
            if self._pool is None or len(hosts) >= self._limits.min_hosts:
                self._report(ending, number, hosts, silent)
                return hosts
            shortage = f"{len(hosts)} of {plural(len(self._pool.hosts), 'host')} answer, --min-hosts "
            ending = Ending(FAILED, {}, f"{shortage}{self._limits.min_hosts}", ending.step)
            if not self._has_restarts(ending):
                return FAILED

    def _pause(self, seconds: float) -> bool:
        """Wait. Return False if this process was asked to stop."""
        deadline = time.monotonic() + seconds
        while not self.stop.signal_name and time.monotonic() < deadline:
            time.sleep(min(LOOK, seconds))
        return not self.stop.signal_name

    def _report(self, ending: Ending, number: str, hosts: Sequence[HostEntry], silent: Sequence[str]) -> None:
        place, facts = "", {}
        if self._pool is not None:
            names, ranks = [host.name for host in hosts], sum(host.slots for host in hosts)
            place = f" on {plural(len(hosts), 'host')} ({', '.join(few(names))}), {plural(ranks, 'rank')}"
            facts = {"hosts": names, "ranks": ranks}
        if silent:
            place += f"; left out (no answer): {', '.join(few(silent))}"
        say(f"zero_mpi supervise: {number} from {self._folder.checkpoint()[0] or 'the start'}{place}")
        reason = f"{ending.reason}; {number}{place}"
        self._folder.note(events.RESTARTED, ending.step, reason=reason, silent=silent, **facts)


def main() -> None:
    """Run the command."""
    try:
        restarts = prepare(sys.argv[1:])
        restarts.stop.listen()
        status = restarts.run()
    except UsageError as error:
        say(f"zero_mpi supervise: error: {one_line(str(error))}")
        status = BAD_USAGE
    leave(status)
