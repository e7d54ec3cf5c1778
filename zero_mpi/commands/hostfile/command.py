"""`zero-mpi hostfile FILE --for mpich|openmpi`: the command."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from zero_mpi.cli.parser import Parser
from zero_mpi.cli.text import write
from zero_mpi.commands.hostfile.host_entries import LINES, MOST, read_file
from zero_mpi.launch.ending import say
from zero_mpi.launch.world import World, run


def make_parser() -> Parser:
    """Make the parser of the command line."""
    parser = Parser(
        prog="zero-mpi hostfile",
        description="Write a hostfile for a launcher.",
        epilog="Examples, in a PBS job and a Slurm job:\n\n"
        "  zero-mpi hostfile $PBS_NODEFILE --for openmpi\n"
        "  scontrol show hostnames | zero-mpi hostfile - --for mpich",
    )
    parser.add_argument("file", help="hostfile of either launcher, or list of names; -: standard input")
    parser.add_argument(
        "--for", dest="launcher", choices=tuple(LINES), required=True, help="launcher that reads it"
    )
    return parser


def command(world: World, arguments: Sequence[str]) -> int:
    """Print the hosts. Return the exit status."""
    options = make_parser().parse_args(arguments)
    hosts = read_file(options.file)
    limited = [host.name for host in hosts if host.most is not None]
    if limited and options.launcher != "openmpi":
        say(f"zero_mpi hostfile: {MOST} of {', '.join(limited)} left out: MPICH has no such limit")
    write(map(LINES[options.launcher], hosts))
    return 0


main = partial(run, "hostfile", command, alone=True)
