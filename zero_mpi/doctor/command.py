"""The command: its flags, the order in which things are looked at, the table, the file of figures.

Rows are printed as they are found, so that a table that stops shows what stands still; a watchdog ends it
then. All ranks hold all rows, so they agree on the exit status without another word.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zero_mpi import __version__
from zero_mpi.cli.parser import Parser
from zero_mpi.cli.text import plural, write
from zero_mpi.config.settings import Config
from zero_mpi.doctor import (
    binding,
    clocks,
    compute,
    gpu,
    links,
    mpi_library,
    other_processes,
    output_folder,
    ranks_or_threads,
    shared_memory,
    system_limits,
    versions,
)
from zero_mpi.doctor.ranks import Ranks, find_ranks
from zero_mpi.doctor.verdicts import BAD, NOTE, OK, Row, lines
from zero_mpi.environment import portable
from zero_mpi.errors import UsageError
from zero_mpi.files.atomic import write_json
from zero_mpi.files.open import check_target
from zero_mpi.launch.consistency import is_first, split_into
from zero_mpi.launch.ending import FAILED
from zero_mpi.launch.watchdog import Watchdog
from zero_mpi.launch.world import World, run

MOST_MB, QUICK_MB = 16.0, 1.0
BUFFERS = 4  # of the largest size that a rank may need at once
THOROUGH, QUICK = (4, 0.06, 0.5), (32, 0.02, 0.2)  # growth of sizes; seconds for a figure, for products
FIGURES = """\
The file of --json holds all rows and, for programs: ranks, nodes, ranks_per_node, memory_bytes_per_rank,
flops_per_second_per_rank (fp32, the median rank, all at once), bf16_flops_per_second_per_rank (0 where
nothing multiplies bf16 faster than fp32), tokens_per_second_by_threads (of the first host, by threads a
rank; empty where nothing was tried), and links.node and links.between (null where
there are none) with alpha_seconds and beta_seconds_per_byte: a collective takes alpha * messages +
beta * bytes. Messages are those that follow each other: the depth of a tree in a gather, one in a reduction,
which goes straight to the owners. Bytes are those that a rank gives to others (in a node) or that leave a
node (between nodes): (P - 1) / P of a buffer among P. links.node is that of the transport that a job takes
there; over shared memory a gather moves nothing."""


def make_parser() -> Parser:
    """The command line."""
    parser = Parser(
        prog="mpirun -n N [HOSTS] python -m zero_mpi.doctor",
        description="Look whether a job would run well on these hosts, and say what to do where not. Start "
        "it as you start the job: the same launcher, hosts, ranks, environment. Exit status 0: it would run, "
        "whatever the notes say; 1: it would fail, see the lines marked bad; 2: wrong flags.",
        epilog=FIGURES,
    )
    default, most = Config().out, f"{MOST_MB:g}, with --quick {QUICK_MB:g}"
    add = parser.add_argument
    add("--out", default=default, metavar="DIR", help=f"run folder to try (default: {default})")
    buffers = f"largest buffer to gather and reduce, in MiB (default: {most})"
    add("--max-mb", type=float, metavar="N", help=buffers)
    add("--bits", choices=portable.CHOICES, help="as of the job (default: native)")
    add("--json", metavar="FILE", help="write rows and figures there; zero_mpi.plan reads them")
    add("--quick", action="store_true", help="fewer sizes and repeats: a few seconds")
    seconds = "seconds for one concern (default: 120; 0: any)"
    add("--timeout", type=float, default=120.0, metavar="X", help=seconds)
    return parser


def read_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags; UsageError for values that cannot be meant."""
    options = make_parser().parse_args(arguments)
    if options.max_mb is None:
        options.max_mb = QUICK_MB if options.quick else MOST_MB
    if not 2**-10 <= options.max_mb < math.inf:
        raise UsageError(f"--max-mb {options.max_mb:g}: expected at least 1 KiB, {2**-10:g}")
    if not 0 <= options.timeout < math.inf:
        raise UsageError(f"--timeout {options.timeout:g}: expected seconds, or 0 for any")
    return options


def command(world: World, arguments: Sequence[str]) -> int:
    """Look at everything. Returns the exit status, the same on all ranks."""
    options = world.together(lambda: read_flags(arguments))
    if split_into(world.size) and not is_first():
        return FAILED  # each process takes itself for the job: one of them tells it
    if options.json is not None:
        world.on_root(lambda: check_target("--json", options.json))
    watchdog = Watchdog(world.rank, options.timeout, world.kill)
    watchdog.beat("finding the other ranks")
    found, figures = list[Row](), dict[str, Any]()
    try:
        where = find_ranks(world)
        for name, look in concerns(where, options, figures).items():
            watchdog.beat(name)
            for row in look():
                found.append(row)
                if world.rank == 0:
                    write(lines(row))
        if options.json is not None:
            world.on_root(lambda: keep(options.json, where, figures, found))
    finally:
        watchdog.stop()
    counts = Counter(row.verdict for row in found)
    if world.rank == 0:
        end = "a job would fail" if counts[BAD] else "a job would run"
        write([f"{counts[OK]} ok, {plural(counts[NOTE], 'note')}, {counts[BAD]} bad: {end}"])
    return FAILED if counts[BAD] else 0


def concerns(
    where: Ranks, options: argparse.Namespace, figures: dict[str, Any]
) -> dict[str, Callable[[], Iterable[Row]]]:
    """All that is looked at, first what takes no time; each notes its `figures`, and is collective."""
    growth, for_links, for_products = QUICK if options.quick else THOROUGH
    figures |= {"ranks": where.size, "nodes": len(where.nodes), "ranks_per_node": max(map(len, where.nodes))}

    def effort() -> links.Effort:
        return links.Effort(largest(options.max_mb, figures["memory_bytes_per_rank"]), growth, for_links)

    return {
        "versions": lambda: versions.rows(where.gather(versions.look(where.world))),
        "MPI library": lambda: mpi_library.section(where),
        "hosts and cores": lambda: binding.section(where),
        "neighbours": lambda: other_processes.section(where),
        "limits": lambda: system_limits.section(where, figures),
        "shared memory": lambda: shared_memory.section(where),
        "CUDA": lambda: gpu.rows(where.of_nodes(gpu.look), where.names),
        "run folder": lambda: output_folder.section(where, Path(options.out)),
        "clocks": lambda: clocks.rows(clocks.offsets(where), where.names[1:]),
        "speed of products": lambda: compute.section(where, for_products, figures),
        "bf16 and BLAS": lambda: compute.kernels(where, for_products, figures),
        "ranks or threads": lambda: ranks_or_threads.section(where, for_products, figures),
        "gathers and reductions": lambda: links.section(where, effort(), figures),
    }


def largest(mebibytes: float, memory: int) -> int:
    """Bytes of the largest buffer; UsageError if a rank cannot hold a few of it."""
    if mebibytes * 2**20 * BUFFERS > memory:
        most = memory // BUFFERS >> 20
        raise UsageError(
            f"--max-mb {mebibytes:g}: expected at most {most}: a rank has {memory >> 20} MiB of memory"
        )
    return int(mebibytes * 2**20)


def keep(path: str, where: Ranks, figures: dict[str, Any], found: list[Row]) -> None:
    """The file of figures, whole or not at all; UsageError if it cannot be written."""
    about = {
        "zero_mpi": __version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "hosts": [{"name": name, "ranks": list(ranks)} for ranks, name in where.named(where.nodes)],
        **figures,
        "rows": [asdict(row) for row in found],
    }
    write_json("--json", path, about)


def main() -> None:
    """Entry point."""
    portable.claim(portable.flag_of(sys.argv[1:]))
    run("doctor", command, sys.argv[1:])
