"""`python -m zero_mpi.supervise`: its flags, and its end."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zero_mpi import environment
from zero_mpi.cli.parser import Parser
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import one_line, shown
from zero_mpi.launch import interrupts
from zero_mpi.launch.ending import BAD_USAGE, say
from zero_mpi.supervise.host_pool import HostPool, find_pool, ranks_of
from zero_mpi.supervise.launch_line import SRUN, LaunchLine
from zero_mpi.supervise.restarts import RestartLimits, Restarts
from zero_mpi.supervise.run_facts import RunFacts

BEFORE = "--"  # stands before the command


def make_parser() -> Parser:
    """The parser of the command line, up to BEFORE."""
    usual = RestartLimits()
    parser = Parser(
        prog="python -m zero_mpi.supervise",
        usage="%(prog)s [flags] -- COMMAND ...",
        description="Start a run, and start it again from its newest checkpoint, on the hosts that are left, "
        "where a rank or a host dies or hangs. Exit status: that of the run.",
        epilog="Example, with a host in reserve:\n\n"
        "  python -m zero_mpi.supervise --spare 1 -- \\\n"
        "      mpirun --hostfile hosts -n 6 python -m zero_mpi.train --out runs/long",
    )
    texts: dict[str, tuple[float, str]] = {
        "--restarts": (usual.restarts, "at most, without a new checkpoint in between"),
        "--backoff": (usual.backoff, "seconds to the first of these restarts; doubled each time"),
        "--hang-after": (usual.hang_after, "end a run that shows no life for such seconds; 0: never"),
        "--spare": (0, "hosts at the end of the list that wait for others to be lost"),
        "--min-hosts": (usual.min_hosts, "do not start again on fewer"),
        "--probe-timeout": (HostPool.timeout, "seconds for a host to answer"),
    }
    for name, (default, text) in texts.items():
        parser.add_argument(name, type=type(default), default=default, help=text)
    of_hosts = "hosts (default: the command's own hostfile, or the batch job's)"
    parser.add_argument("--hostfile", metavar="FILE", help=of_hosts)
    well = "ends with 0 if {host} is well (default: by ssh, or as the launcher goes there)"
    parser.add_argument("--probe", metavar="COMMAND", help=well)
    of_run = "folder of the run (default: the --out of the command)"
    parser.add_argument("--run", metavar="DIR", help=of_run)
    return parser


def command(arguments: Sequence[str]) -> int:
    """Supervise the run. Returns the exit status."""
    restarts = prepare(arguments)
    restarts.stop.listen()
    return restarts.run()


def prepare(arguments: Sequence[str]) -> Restarts:
    """What is to be done, from the command line. Raises UsageError."""
    cut = arguments.index(BEFORE) if BEFORE in arguments else len(arguments)
    wanted = f"expected the command behind {BEFORE}: zero-mpi supervise {BEFORE} mpirun ..."
    if cut == len(arguments) and arguments and not arguments[0].startswith("-"):
        raise UsageError(wanted)
    options = checked(make_parser().parse_args(arguments[:cut]))
    line = LaunchLine.of(arguments[cut + 1 :])
    if not line.words:
        raise UsageError(wanted)
    if environment.under_launcher():
        raise UsageError("supervise starts the launcher itself: leave mpirun out before it")
    pool = find_pool(line, options.hostfile or "", options.probe or "")
    limits = RestartLimits(options.restarts, options.backoff, options.hang_after, options.min_hosts)
    facts = RunFacts(Path(options.run) if options.run else line.out())
    return Restarts(line, with_spare(pool, options, line), facts, limits)


def checked(options: Namespace) -> Namespace:
    """The flags, if their numbers make sense. Raises UsageError."""
    least = {"restarts": 0, "backoff": 0, "hang_after": 0, "spare": 0, "min_hosts": 1, "probe_timeout": 0}
    for name, bound in least.items():
        value = getattr(options, name)
        if not bound <= value < 1e9:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} {value:g}: expected a number from {bound} to 1e9")
    return options


def with_spare(pool: HostPool | None, options: Namespace, line: LaunchLine) -> HostPool | None:
    """The hosts, some of them kept back. Raises UsageError where there are too few, or none can be told."""
    wanted = options.hostfile or options.spare or options.min_hosts > 1
    of_command = line.placed() or (line.hosts() if options.hostfile and line.launcher != SRUN else "")
    if wanted and of_command:
        raise UsageError(
            "--hostfile, --spare and --min-hosts: the command itself says where ranks go "
            f"({shown(of_command)})"
        )
    if pool is None:
        if options.spare or options.min_hosts > 1:
            raise UsageError("--spare and --min-hosts: no hosts are known; give --hostfile FILE")
        return None
    if not line.launcher:
        raise UsageError("--hostfile: expected mpirun, mpiexec or srun in the command, to tell it the hosts")
    if len(pool.hosts) - max(options.spare, pool.spare) < options.min_hosts:
        raise UsageError(
            f"--spare {options.spare}: of {len(pool.hosts)} hosts at least {options.min_hosts} must be left; "
            "name more hosts"
        )
    pool = replace(pool, spare=max(options.spare, pool.spare), timeout=options.probe_timeout)
    ranks_of(line, pool, pool.hosts)  # its numbers are numbers
    return pool


def main() -> None:
    """Entry point of the command."""
    try:
        status = command(sys.argv[1:])
    except UsageError as error:
        say(f"zero_mpi supervise: error: {one_line(str(error))}")
        status = BAD_USAGE
    interrupts.leave(status)
