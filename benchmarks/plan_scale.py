"""Compares `zero-mpi plan` with measured steps and gathers of 64 and 128 ranks over slow links.

    python benchmarks/plan_scale.py [--rate 20mbit] [--hosts 8 16] [--each 8] [--steps 2]

Run as root: it makes the hosts as namespaces of this machine (tools/cluster/hosts_up.sh). All ranks share the
machine's cores, so the links are slow enough to dominate. For each number of hosts and strategy, a job
measures messages and matmuls, as plan_check.py does, and sums of arrays, on all ranks at the same time. From
these numbers alone, the plan predicts every line. Then the job times steps and, with full-shard, gathers of
all units, one after the other.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import plan_check
import step
from plan_check import Line, case_of, machine_of

from zero_mpi.cli.parser import Parser
from zero_mpi.config.settings import Config
from zero_mpi.errors import UsageError
from zero_mpi.launch.world import World, run
from zero_mpi.plan.case import Case
from zero_mpi.plan.machine import Machine
from zero_mpi.plan.step_time import gather_seconds, step_time
from zero_mpi.train.resolve import set_threads

HERE = Path(__file__).resolve().parent
STRATEGIES = ("full-shard", "hybrid-shard", "no-shard")
GATHERS = "gathers of full-shard"
LARGE, REPEATS = 1 << 19, 6  # bytes of a timed message (a host's queue can hold one per rank); repeats
PASS, PASSES = 1 << 19, 1.0  # elements of the arrays that are added; seconds for which they are added
WIDTH = 192  # width of the model: the transfers of a step take some seconds
PATIENCE = 240  # seconds for a job
BOUND = 0.15
GATHERINGS = 5
BURST = "32kb"  # bytes that an idle link may send at once: small compared with a message


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="python benchmarks/plan_scale.py",
        description="Compare the plan with runs of many ranks on hosts with slow links.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rate", default="20mbit", help="speed of each host's link")
    parser.add_argument("--hosts", nargs="+", type=int, default=[8, 16])
    parser.add_argument("--each", type=int, default=8, help="ranks per host")
    parser.add_argument("--strategy", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--steps", type=int, default=2, help="number of timed steps for each strategy")
    return parser


def line_of(strategy: str, each: int) -> Line:
    """Return the job to time and to plan: a small model, with shared memory inside hosts."""
    return Line("W3", each, strategy, batch=1, context=32, transport="auto", width=WIDTH)


# ------------------------------------------------------------------------------------------------- in a job


def job(world: World, arguments: Sequence[str]) -> int:
    """Measure on all ranks. Rank 0 prints the results as JSON."""
    options = make_parser().parse_args(arguments)
    set_threads(Config())
    ranks = world.mpi.COMM_WORLD
    found = plan_check.rates(ranks, options.each, LARGE, REPEATS)
    found["moves"] = float(np.mean(ranks.allgather(passes_per_second())))
    (strategy,) = options.strategy
    (variant,) = step.make_runs(world, step_options(strategy, options))
    for number in range(options.steps + 1):
        variant.timed_step(number)
    took = {strategy: step.median_of_longest(variant.comm, variant.seconds[1:])}
    if strategy == STRATEGIES[0]:
        took[GATHERS] = gathers(variant)
    if world.rank == 0:
        print(json.dumps({"found": found, "took": took}))
    return 0


def step_options(strategy: str, options: argparse.Namespace) -> argparse.Namespace:
    """Return the parsed flags of step.py for a strategy."""
    flags = plan_check.step_flags(line_of(strategy, options.each), options.steps)
    return step.make_parser().parse_args(flags)


def passes_per_second() -> float:
    """Return this rank's bytes per second when it sums two arrays into a third."""
    a, b, c = (np.ones(PASS, np.float32) for _ in range(3))
    begun, moved = time.perf_counter(), 0
    while time.perf_counter() - begun < PASSES:
        np.add(a, b, out=c)
        moved += a.nbytes + b.nbytes + c.nbytes
    return moved / (time.perf_counter() - begun)


def gathers(variant: step.Run) -> float:
    """Return the seconds that it takes to gather each unit once, one after the other."""
    seconds = []
    for _ in range(GATHERINGS):
        variant.comm.barrier()
        begun = time.perf_counter()
        for unit in variant.module.units:
            unit.parameters.start_gather()
            unit.parameters.wait_gather()
            unit.parameters.release()
        seconds.append(time.perf_counter() - begun)
    return step.median_of_longest(variant.comm, seconds)


# -------------------------------------------------------------------------------------------------- outside


def measured(options: argparse.Namespace) -> Iterator[tuple[int, dict[str, float], dict[str, float]]]:
    """Yield (number of hosts, speeds of the machine, seconds of each line) for each job."""
    sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent / "tests" / "cluster")]
    from hosts import hosts, why_no_hosts  # in tests/cluster

    if reason := why_no_hosts():
        raise UsageError(reason)
    for count, strategy in product(options.hosts, options.strategy):
        flags = ["--each", str(options.each), "--steps", str(options.steps), "--strategy", strategy]
        script = [str(HERE / "plan_scale.py"), "job", *flags]
        os.environ["HOSTS_BURST"] = BURST
        with hosts(count, options.rate) as here:
            status, printed, errors = here.run(count * options.each, options.each, script, timeout=PATIENCE)
        lines = [line for line in printed.splitlines() if line.startswith("{")]
        if status or not lines:
            raise UsageError(f"{strategy} on {count} hosts ended with {status}: {errors.strip()[-500:]}")
        result = json.loads(lines[-1])
        yield count, result["found"], result["took"]


def planned(name: str, hosts: int, each: int, found: dict[str, float]) -> float:
    """Return the seconds that the plan predicts for a line."""
    machine = machine_of(found)
    case = case_of(line_of(STRATEGIES[0] if name == GATHERS else name, each), hosts)
    return planned_gathers(case, machine) if name == GATHERS else step_time(case, machine).seconds


def planned_gathers(case: Case, machine: Machine) -> float:
    """Return the predicted seconds of gathering all units, one after the other."""
    units = range(len(case.layout.units))
    return sum(gather_seconds(case, machine, unit, case.kept_bytes(unit)) for unit in units)


def command(world: World, arguments: Sequence[str]) -> int:
    """Measure, plan, and print the table. Return the exit status."""
    options = make_parser().parse_args(arguments)
    ratios = []
    print("| ranks | line | measured ms | plan ms | ratio |")
    print(f"|{'---|' * 5}")
    for hosts, found, took in measured(options):
        for name, seconds in took.items():
            plan = planned(name, hosts, options.each, found)
            ratios.append(plan / seconds)
            ranks = hosts * options.each
            print(
                f"| {ranks} | {name} | {1e3 * seconds:.0f} | {1e3 * plan:.0f} | {ratios[-1]:.2f} |",
                flush=True,
            )
        print(
            f"{hosts} hosts: {', '.join(f'{name} {value:.3g}' for name, value in found.items())}", flush=True
        )
    print(f"{sum(abs(ratio - 1) <= BOUND for ratio in ratios)} of {len(ratios)} within {BOUND:.0%}")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["job"]:
        run("plan_scale job", job, sys.argv[2:])
    run("plan_scale", command, sys.argv[1:], alone=True)
