"""Measures the time and the traffic of a step over several hosts, with messages and with shared memory.

    python benchmarks/step_hosts.py --hosts 2 --each 2 --rate 1gbit -- --workload W1 --batch 2

Run as root: it makes the hosts on this machine (tools/cluster/hosts_up.sh), with links of known speed. Each
variant of strategy and transport runs as a short and a long job of step.py. Their difference shows how many
bytes a step sends over the links; the table has those of the busiest host. The hosts share this machine's
cores.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from zero_mpi.cli.parser import Parser
from zero_mpi.errors import UsageError
from zero_mpi.launch.world import World, run

HERE = Path(__file__).resolve().parent
FEW, PATIENCE = 2, 600  # number of steps of the short job; seconds that a job may take
WARMUP = 1


def make_parser() -> Parser:
    """Return the parser of the command line; arguments after -- are for step.py."""
    parser = Parser(
        prog="python benchmarks/step_hosts.py",
        description="Time steps over hosts. Arguments after -- go to step.py.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--each", type=int, default=2, help="ranks per host")
    parser.add_argument("--rate", default="1gbit", help="speed of each host's link, or none")
    parser.add_argument("--strategy", nargs="+", default=["full-shard", "hybrid-shard", "no-shard"])
    parser.add_argument("--transport", nargs="+", default=["mpi", "shared"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=1, help="rounds of all variants")
    return parser


def measure(options: argparse.Namespace, flags: Sequence[str]) -> Iterator[dict[str, object]]:
    """Yield a result for each variant and round."""
    sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent / "tests" / "cluster")]
    from hosts import hosts, why_no_hosts  # module of the tests

    if reason := why_no_hosts():
        raise UsageError(reason)
    with hosts(options.hosts, None if options.rate == "none" else options.rate) as here:
        for _, transport, strategy in product(range(options.rounds), options.transport, options.strategy):
            variant = ["--strategy", strategy, "--transport", transport, *flags]
            _, few = job(here, options, FEW, variant)
            result, many = job(here, options, options.steps, variant)
            carried = [(m - f) / (options.steps - FEW) / 1e6 for f, m in zip(few, many, strict=True)]
            yield result | {"link_sent_mb": max(carried[0::2]), "link_received_mb": max(carried[1::2])}


def job(here: Any, options: argparse.Namespace, steps: int, flags: Sequence[str]) -> tuple[dict, list[int]]:
    """Return the result of a job of step.py, and the bytes that the link of each host sent and received."""
    from jobs import COMPILED

    before = here.traffic()
    script = [HERE / "step.py", "--json", "--warmup", str(WARMUP), "--steps", str(steps), *flags]
    ranks = options.hosts * options.each
    status, printed, errors = here.run(ranks, options.each, script, timeout=PATIENCE, env=COMPILED)
    if status != 0:
        raise UsageError(f"step.py {' '.join(flags)}: status {status}: {errors or printed}")
    after = here.traffic()
    carried = []
    for name in here.names:
        carried += [after[name].sent - before[name].sent, after[name].received - before[name].received]
    return json.loads(printed.splitlines()[-1]), carried


def command(world: World, arguments: Sequence[str]) -> int:
    """Measure and print the results."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = make_parser().parse_args(arguments[:cut])
    print(f"{options.hosts} hosts x {options.each} ranks, links of {options.rate}; MB of the busiest host")
    print(f"{'strategy':14} {'transport':9} {'ms':>8} {'wait':>8} {'sent MB':>8} {'received':>8}")
    for line in measure(options, arguments[cut + 1 :]):
        print(
            f"{line['strategy']:14} {line['transport']:9} {line['ms']:8.1f} {line['wait_ms']:8.1f} "
            f"{line['link_sent_mb']:8.2f} {line['link_received_mb']:8.2f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    run("step_hosts", command, sys.argv[1:], alone=True)
