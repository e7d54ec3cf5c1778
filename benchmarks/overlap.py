"""Measures how much of FULL_SHARD's communication overlaps with computation, over links of known speed.

    python benchmarks/overlap.py --rate 1gbit none

Run as root: for each rate it makes two hosts on this machine (tools/cluster/hosts_up.sh) and runs
overlap_step.py on them. That job times a step, the same step with immediate waits, computation alone, and
transfers alone. `hidden` is how much shorter the step is than the sum of computation and transfers, as a
fraction of the smaller of these two. `none` does not limit the links. The hosts share this machine's cores.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from zero_mpi.cli.parser import Parser
from zero_mpi.errors import UsageError
from zero_mpi.launch.world import World, run

HERE = Path(__file__).resolve().parent
PATIENCE = 900  # seconds that a job may take
WAYS = ("step", "at once", "computation", "transfers")


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="python benchmarks/overlap.py",
        description="Measure how much communication overlaps with computation.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--rate", nargs="+", default=["1gbit", "none"], help="speeds of the hosts' links; none: no limit"
    )
    parser.add_argument("--mpi", choices=("mpich", "openmpi"), default="mpich")
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object per rate")
    return parser


def measure(options: argparse.Namespace, flags: Sequence[str]) -> Iterator[dict[str, object]]:
    """Yield the result of a job on two hosts for each rate."""
    sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent / "tests" / "cluster")]
    from hosts import hosts, why_no_hosts  # module of the tests
    from jobs import COMPILED

    if reason := why_no_hosts():
        raise UsageError(reason)
    each = options.ranks_per_host
    for rate in options.rate:
        with hosts(2, None if rate == "none" else rate) as here:
            job = [HERE / "overlap_step.py", *flags]
            status, printed, errors = here.run(
                2 * each, each, job, mpi=options.mpi, timeout=PATIENCE, env=COMPILED
            )
        if status != 0:
            raise UsageError(f"the job at {rate} ended with status {status}: {(errors or printed).strip()}")
        yield {"rate": rate, **json.loads(printed.splitlines()[-1])}


def command(world: World, arguments: Sequence[str]) -> int:
    """Measure, and print the results."""
    options, flags = make_parser().parse_known_args(arguments)
    results = measure(options, flags)
    if not options.json:
        print_table(results)
    for result in results:
        print(json.dumps(result), flush=True)
    return 0


def print_table(results: Iterator[Mapping[str, object]]) -> None:
    """Print a table of the results, with times in milliseconds."""
    titles = " ".join(f"{way:>11}" for way in WAYS)
    print(f"{'rate':10} {titles} {'hidden':>7} {'wait':>7} {'sent MB':>8} {'MB/s':>6}")
    for line in results:
        times = " ".join(f"{line[way]:11.1f}" for way in WAYS)
        rate = 1e3 * line["sent"] / line["transfers"]
        rest = f"{line['hidden']:7.0%} {line['wait']:7.1f} {line['sent']:8.1f} {rate:6.0f}"
        print(f"{line['rate']:10} {times} {rest}", flush=True)


if __name__ == "__main__":
    run("overlap", command, sys.argv[1:], alone=True)
