"""The command: prints where the time of each rank went."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from zero_mpi.cli.parser import Parser
from zero_mpi.cli.text import write
from zero_mpi.commands.trace.read import read
from zero_mpi.commands.trace.tables import table
from zero_mpi.launch.world import World, run


def make_parser() -> Parser:
    """The command line."""
    parser = Parser(
        prog="zero-mpi trace",
        description="Where the time of each rank went, from a time line of zero_mpi.train --trace FILE. "
        "To look at it, drop the file on ui.perfetto.dev, which keeps it on your machine, or open it in "
        "chrome://tracing.",
    )
    parser.add_argument("file", metavar="FILE", help="a time line of --trace, .json or .json.gz")
    return parser


def command(world: World, arguments: Sequence[str]) -> int:
    """Print the table. Return the exit status."""
    write(table(read(Path(make_parser().parse_args(arguments).file))))
    return 0


def main() -> None:
    """Entry point."""
    run("trace", command, sys.argv[1:], alone=True)
