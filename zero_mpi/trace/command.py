"""`python -m zero_mpi.trace FILE [FILE2]`: where the time of each rank went; two files are compared."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from zero_mpi.cli.parser import Parser
from zero_mpi.cli.text import write
from zero_mpi.errors import UsageError
from zero_mpi.launch.world import World, run
from zero_mpi.trace.read import read
from zero_mpi.trace.tables import comparison, table


def make_parser() -> Parser:
    """The command line."""
    parser = Parser(
        prog="python -m zero_mpi.trace",
        description="Where the time of each rank went, from a time line of zero_mpi.train --trace FILE. "
        "To look at it, drop the file on ui.perfetto.dev, which keeps it on your machine, or open it in "
        "chrome://tracing.",
    )
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="a time line, .json or .json.gz; two are compared"
    )
    return parser


def command(world: World, arguments: Sequence[str]) -> int:
    """Print the tables. Returns the exit status."""
    files = make_parser().parse_args(arguments).files
    if len(files) > 2:
        raise UsageError(f"expected one or two files, got {len(files)}")
    found = [read(Path(name)) for name in files]
    lines = list(table(found[0]))
    if len(found) == 2:
        lines += ["", *table(found[1]), "", *comparison(*found)]
    write(lines)
    return 0


def main() -> None:
    """Entry point."""
    run("trace", command, sys.argv[1:], alone=True)
