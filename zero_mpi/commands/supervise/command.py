"""Command `supervise`: its flags and its exit status."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zero_mpi import environment
from zero_mpi.cli.parser import Parser
from zero_mpi.commands.hostfile.host_entries import LINES
from zero_mpi.commands.supervise.decision import RunFacts
from zero_mpi.commands.supervise.host_pool import PLACEHOLDERS, HostPool, Template, find_pool
from zero_mpi.commands.supervise.restarts import Restarts
from zero_mpi.errors import UsageError
from zero_mpi.files.foreign import one_line
from zero_mpi.launch.ending import BAD_USAGE, say
from zero_mpi.launch.stopping import leave

BEFORE = "--"  # separates the flags from the command
NUMBERS: dict[str, tuple[float, int, str]] = {  # flag -> default, least value, help
    "--restarts": (10, 0, "maximum number of restarts without a new checkpoint"),
    "--backoff": (5.0, 0, "seconds before the first restart; doubled each time"),
    "--hang-after": (900.0, 0, "seconds without a change in the run folder before a restart; 0: never"),
    "--spare": (0, 0, "spare hosts, taken from the end of the list"),
    "--min-hosts": (1, 1, "minimum number of hosts for a restart"),
    "--probe-timeout": (HostPool.timeout, 0, "seconds in which a host must answer"),
}


def make_parser() -> Parser:
    """Make the parser of the command line, up to BEFORE."""
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
    for name, (default, _, text) in NUMBERS.items():
        parser.add_argument(name, type=type(default), default=default, help=text)
    parser.add_argument(
        "--hostfile", metavar="FILE", help="hosts and their ranks (default: from the batch job)"
    )
    parser.add_argument(
        "--for", dest="form", choices=tuple(LINES), default="mpich", help="launcher that reads {hostfile}"
    )
    is_well = "command that exits with 0 if {host} works (default: ssh; in Slurm srun)"
    parser.add_argument("--probe", metavar="COMMAND", help=is_well)
    parser.add_argument("--run", metavar="DIR", help="run folder (default: --out of the command)")
    return parser


def command(arguments: Sequence[str]) -> int:
    """Supervise the run. Return the exit status."""
    restarts = prepare(arguments)
    restarts.stop.listen()
    return restarts.run()


def prepare(arguments: Sequence[str]) -> Restarts:
    """Return the loop that the command line asks for. Raises UsageError."""
    cut = arguments.index(BEFORE) if BEFORE in arguments else len(arguments)
    wanted = f"expected a command after {BEFORE}: zero-mpi supervise {BEFORE} mpirun ..."
    if cut == len(arguments) and arguments and not arguments[0].startswith("-"):
        raise UsageError(wanted)
    options = checked(make_parser().parse_args(arguments[:cut]))
    template = Template(tuple(arguments[cut + 1 :]), options.form)
    if not template.words:
        raise UsageError(wanted)
    if environment.under_launcher():
        raise UsageError("supervise starts the launcher itself: run it without mpirun")
    pool = find_pool(options.hostfile or "", options.probe or "") if template.takes_hosts else None
    facts = RunFacts(Path(options.run) if options.run else template.out())
    return Restarts(template, with_spare(pool, options, template), facts, options)


def checked(options: Namespace) -> Namespace:
    """Return the flags, if their numbers are valid. Raises UsageError."""
    for flag, (_, bound, _) in NUMBERS.items():
        value = getattr(options, flag[2:].replace("-", "_"))
        if not bound <= value < 1e9:
            raise UsageError(f"{flag} {value:g}: expected a number from {bound} to 1e9")
    return options


def with_spare(pool: HostPool | None, options: Namespace, template: Template) -> HostPool | None:
    """Return the hosts, the last of them kept back; raises UsageError where too few are known."""
    wanted = options.hostfile or options.spare or options.min_hosts > 1
    if not template.takes_hosts:
        if wanted:
            expected = f"expected one of {', '.join(PLACEHOLDERS)} in the command"
            raise UsageError(
                f"--hostfile, --spare and --min-hosts: {expected}: mpirun -f {{hostfile}} -n {{ranks}} ..."
            )
        return None
    if pool is None:
        raise UsageError("the command has a placeholder, but the hosts are unknown: add --hostfile FILE")
    if len(pool.hosts) - options.spare < options.min_hosts:
        raise UsageError(
            f"--spare {options.spare}: expected at least --min-hosts {options.min_hosts} of "
            f"{len(pool.hosts)} hosts to remain; list more hosts"
        )
    return replace(pool, spare=options.spare, timeout=options.probe_timeout)


def main() -> None:
    """Run the command."""
    try:
        status = command(sys.argv[1:])
    except UsageError as error:
        say(f"zero_mpi supervise: error: {one_line(str(error))}")
        status = BAD_USAGE
    leave(status)
