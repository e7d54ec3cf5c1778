"""Command `doctor`: its flags, the list of checks, the table and the JSON file.

Rows are printed as soon as they are ready. So if a check hangs, the rows before it have been printed, and a
watchdog ends the job. All ranks have all rows, so they agree on the exit status.
"""

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

from zero_mpi import __version__
from zero_mpi.cli.parser import Parser
from zero_mpi.cli.text import plural, write
from zero_mpi.commands.doctor import hosts, measures
from zero_mpi.commands.doctor.ranks import BAD, NOTE, OK, Ranks, Row, find_ranks, lines
from zero_mpi.config.settings import Config
from zero_mpi.environment import portable
from zero_mpi.errors import UsageError
from zero_mpi.files.atomic import write_json
from zero_mpi.files.open import check_target
from zero_mpi.launch.consistency import is_first, split_into
from zero_mpi.launch.ending import FAILED
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.launch.world import World, run

FIGURES = """\
The --json file holds all rows and these values: ranks, nodes, ranks_per_node, memory_bytes_per_rank, \
flops_per_second_per_rank (fp32, median with all ranks busy), bf16_flops_per_second_per_rank (0 if bf16 \
is not faster than fp32), and links.node and links.between (null if there is none) with \
alpha_seconds and beta_seconds_per_byte: a message of n bytes takes alpha + beta * n, while all ranks send \
(links.node) or the ranks of a node share its link (links.between)."""

# All checks, the quick ones first. Every check is collective.
CHECKS: tuple[tuple[str, Callable[[Ranks], Iterable[Row]]], ...] = (
    ("versions", hosts.versions),
    ("MPI library", hosts.library),
    ("hosts and cores", hosts.cores),
    ("load", hosts.load),
    ("limits", hosts.limits),
    ("shared memory", hosts.shared_memory),
    ("CUDA", hosts.cuda),
    ("run folder", measures.run_folder),
    ("speed of products", measures.products),
    ("speed of bf16 products", measures.low_precision),
    ("links", measures.links),
)


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="mpirun -n N [HOSTS] zero-mpi doctor",
        description="Check hosts, MPI, limits and speed before a job, and print what to change. Start it "
        "like the job: same launcher, hosts, ranks and environment. Exit status 0: a job can run (notes "
        "may advise changes); 1: a job would fail, see lines marked bad; 2: wrong flags.",
        epilog=FIGURES,
    )
    default = Config().out
    add = parser.add_argument
    add("--out", default=default, metavar="DIR", help=f"run folder to check (default: {default})")
    add("--bits", choices=portable.CHOICES, help="kernels of the job (default: native)")
    add("--json", metavar="FILE", help="write results to FILE, for zero-mpi plan --doctor")
    add("--quick", action="store_true", help="fewer repetitions; takes a few seconds")
    seconds = "seconds without progress after which the job is ended (default: 120; 0: never)"
    add("--timeout", type=float, default=120.0, metavar="X", help=seconds)
    return parser


def read_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the flags. Raise UsageError if a value is out of range."""
    options = make_parser().parse_args(arguments)
    if not 0 <= options.timeout < math.inf:
        raise UsageError(f"--timeout {options.timeout:g}: expected seconds, or 0 for no limit")
    return options


def command(world: World, arguments: Sequence[str]) -> int:
    """Run all checks. Return the exit status, the same on all ranks."""
    options = world.run_on_all(lambda: read_flags(arguments))
    if split_into(world.size) and not is_first():
        return FAILED  # without MPI each process is a job; only the first process prints rows
    if options.json is not None:
        world.on_root(lambda: check_target("--json", options.json))
    watchdog = Watchdog(world.rank, options.timeout, world.kill)
    watchdog.beat("finding the other ranks")
    rows = list[Row]()
    try:
        job = find_ranks(world, options)
        job.figures.update(ranks=world.size, nodes=len(job.nodes), ranks_per_node=max(map(len, job.nodes)))
        for name, check in CHECKS:
            watchdog.beat(name)
            for row in check(job):
                rows.append(row)
                if world.rank == 0:
                    write(lines(row))
        if options.json is not None:
            report = {
                "zero_mpi": __version__,
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "hosts": [{"name": name, "ranks": list(ranks)} for ranks, name in job.named(job.nodes)],
                **job.figures,
                "rows": [asdict(row) for row in rows],
            }
            world.on_root(lambda: write_json("--json", options.json, report))
    finally:
        watchdog.stop()
    counts = Counter(row.verdict for row in rows)
    if world.rank == 0:
        end = "a job would fail" if counts[BAD] else "a job would run"
        write([f"{counts[OK]} ok, {plural(counts[NOTE], 'note')}, {counts[BAD]} bad: {end}"])
    return FAILED if counts[BAD] else 0


def main() -> None:
    portable.claim(portable.flag_of(sys.argv[1:]))
    run("doctor", command, sys.argv[1:])
