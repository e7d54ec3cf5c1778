"""The command: prints where the time of each rank went."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from zero_mpi.cli.parser import Parser
from zero_mpi.cli.text import plural, write
from zero_mpi.commands.trace.breakdown import COLUMNS, HIDDEN, OTHER, Share, exposed_by_unit, shares
from zero_mpi.commands.trace.read import LATEST, Recorded, read
from zero_mpi.files.foreign import shown
from zero_mpi.launch.world import World, run

UNITS = 5  # of those that are waited for longest
MEANING = (
    "exposed: waits for transfers and other ranks; hidden: transfers under way meanwhile, beside all this;",
    "moving: what is done for transfers between stages, without the waits; sent: bytes given to other ranks",
)


def make_parser() -> Parser:
    """Make the parser of the command line."""
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


def table(recorded: Recorded) -> Iterator[str]:
    """Yield lines about a time line: a row for each rank, and what the ranks waited for."""
    found, steps = shares(recorded), recorded.steps
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    which += f" of {plural(len(found), 'rank')}"
    yield f"{shown(recorded.path)}: {which}, zero_mpi {shown(recorded.about['zero_mpi'], 40)}"
    yield "milliseconds a step, and their share of it"
    columns = [name for name in COLUMNS if name == OTHER or any(share.columns[name] for share in found)]
    names = "".join(f" {name:>15}" for name in columns)
    yield from ("", f"{'rank':>4} {'step':>10}{names} {HIDDEN:>10} {'sent MB':>9}")
    yield from (row(share, columns) for share in found)
    yield from ("", *MEANING, "")
    longest = exposed_by_unit(found)[:UNITS]
    if longest:
        yield "waited for longest (mean of the ranks, ms a step):"
        yield from (f"  {lasted / 1e3:>10.3f}  {name}" for name, lasted in longest)
    wrong, ends_in = recorded.about.get("clock_error_us"), recorded.about.get("ends_in")
    if isinstance(wrong, int | float) and 0 < wrong <= LATEST:
        yield f"clocks of different hosts are aligned to {wrong:.0f} us"
    if ends_in is not None:
        yield f"recording ended in step {shown(ends_in, 40)}: there were too many events"


def row(share: Share, columns: Sequence[str]) -> str:
    """Return the row of a rank."""
    count, step = len(share.steps), share.step
    cells = ""
    for name in columns:
        mean = share.columns[name] / count
        cells += f" {mean / 1e3:>10.3f} " + (f"{100 * mean / step:3.0f}%" if step else "  - ")
    sent, hidden = share.sent / count / 1e6, share.hidden / count
    return f"{share.rank:>4} {step / 1e3:>10.3f}{cells} {hidden / 1e3:>10.3f} {sent:>9.2f}"


def main() -> None:
    """Run the command."""
    run("trace", command, sys.argv[1:], alone=True)
