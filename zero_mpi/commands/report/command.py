"""Command `report`: reads the runs and writes the page.

It is one process without MPI, changes nothing of the runs, and may be used while a job goes on. The page is
written next to its target and renamed, so a browser never loads half of it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from zero_mpi.cli.parser import Parser
from zero_mpi.cli.text import size, write
from zero_mpi.commands.report.runs import LIMIT, read_runs
from zero_mpi.files.atomic import write_output
from zero_mpi.files.open import check_target, refusing
from zero_mpi.launch.world import World
from zero_mpi.launch.world import run as launch

NAME = "report.html"
FULL = 4  # runs that may have LIMIT columns each; more runs share as many
LEAST = 250  # columns that every run has
EXAMPLES = """\
Examples:

  zero-mpi report runs/default
  zero-mpi report runs/a runs/b --out both.html"""


def make_parser() -> Parser:
    """Make the parser of the command line."""
    parser = Parser(
        prog="zero-mpi report",
        description="Write one HTML page with curves, events and settings of runs. It works offline.",
        epilog=EXAMPLES,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder, --out of training")
    parser.add_argument(
        "--out", metavar="FILE", help=f"file to write (default: {NAME} in RUN, or here for several runs)"
    )
    return parser


def command(world: World, arguments: Sequence[str]) -> int:
    """Write the page. Return the exit status."""
    options = make_parser().parse_args(arguments)
    paths = [Path(path) for path in options.runs]
    limit = max(LEAST, LIMIT * FULL // max(FULL, len(paths)))
    runs = read_runs(paths, limit)
    from zero_mpi.commands.report.page import page  # loads libraries, which wrong usage does not need

    default = runs[0].path / NAME if len(runs) == 1 else Path(NAME)
    place = default if options.out is None else Path(options.out)
    check_target("--out", place)
    with refusing("--out", place, "cannot be written"):
        write_output(place, page(runs, datetime.now(UTC)), f"{os.getpid()}.partial")
    write([f"wrote {place} ({size(place.stat().st_size)}): open it in a browser"])
    return 0


main = partial(launch, "report", command, alone=True)
