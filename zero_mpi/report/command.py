"""`python -m zero_mpi.report RUN...`: read the runs, then write the page or draw in the terminal.

It is one process without MPI, changes nothing of the run, and may be used while the job goes on. The page is
written beside its place and renamed, so a browser never reloads half of it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from zero_mpi.cli.parser import Parser
from zero_mpi.cli.text import size, write
from zero_mpi.errors import UsageError
from zero_mpi.files.atomic import write_output
from zero_mpi.files.open import check_target, refusing
from zero_mpi.launch.world import World
from zero_mpi.launch.world import run as launch
from zero_mpi.report.columns import LIMIT
from zero_mpi.report.runs import read_runs
from zero_mpi.report.terminal import terminal

NAME = "report.html"
WHOLE = 4  # runs that may have LIMIT columns each; more of them share as many
LEAST = 250  # columns that every run has
EXAMPLES = """\
Examples:

  python -m zero_mpi.report runs/default
  python -m zero_mpi.report runs/a runs/b --out both.html
  python -m zero_mpi.report runs/default --text"""


def make_parser() -> Parser:
    """The command line."""
    parser = Parser(
        prog="python -m zero_mpi.report",
        description="Show what runs did: curves, figures, checkpoints, samples and settings, as one HTML "
        "page that needs no network, or as text.",
        epilog=EXAMPLES,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, as --out of train named it")
    parser.add_argument(
        "--out", metavar="FILE", help=f"page to write (default: {NAME} in RUN; of several runs, here)"
    )
    parser.add_argument("--text", action="store_true", help="draw in the terminal instead")
    return parser


def command(world: World, arguments: Sequence[str]) -> int:
    """Write the page, or print. Returns the exit status."""
    options = make_parser().parse_args(arguments)
    if options.text and options.out is not None:
        raise UsageError(f"--out {options.out}: --text writes no page; leave one of them out")
    paths = [Path(path) for path in options.runs]
    runs = read_runs(paths, max(LEAST, LIMIT * WHOLE // max(WHOLE, len(paths))))
    if options.text:
        write(terminal(runs), keep="\x1b")
        return 0
    from zero_mpi.report.page import page  # with its libraries, which only the page needs

    default = runs[0].path / NAME if len(runs) == 1 else Path(NAME)
    place = default if options.out is None else Path(options.out)
    check_target("--out", place)
    with refusing("--out", place, "cannot be written"):
        write_output(place, page(runs, datetime.now(UTC)), f"{os.getpid()}.partial")
    write([f"wrote {place} ({size(place.stat().st_size)}): open it in a browser"])
    return 0


def main() -> None:
    """Entry point."""
    launch("report", command, sys.argv[1:], alone=True)
