"""Compares the step times that `zero-mpi plan` predicts with measured times, on hosts with slow links.

    python benchmarks/plan_check.py [--rate 1gbit] [--hosts 2] [--only W1 ...] [--steps 5]

Run as root: it makes hosts in namespaces (tests/cluster/hosts.py) whose links have the given rate. Before
each line, a job on the same ranks measures the time of messages inside a host and between hosts, and the
average speed of matmuls on all ranks at once. From these numbers and an assumed memory speed, the plan
predicts the step. The table shows the prediction and the median of the timed steps. `waits` is the longest
time that a rank waits for others: the communication that is not hidden. The result is useless if the machine
has other load.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from workloads import WORKLOADS, Workload

from zero_mpi.commands.doctor.measures import rate, square_product
from zero_mpi.config.settings import Config
from zero_mpi.launch.world import World, run
from zero_mpi.models import ARCHITECTURES
from zero_mpi.plan.case import Case
from zero_mpi.plan.machine import ASSUMED, Link, Machine
from zero_mpi.plan.step_time import StepTime, step_time
from zero_mpi.train.resolve import set_threads

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
SMALL, LARGE = 8, 8 << 20  # bytes of the small and the large message that are timed
REPEATS = 8
PRODUCTS = 1.5  # seconds for which matmuls are timed


@dataclass(frozen=True)
class Line:
    """A job to time, which is a line of the table."""

    workload: str
    per_host: int
    strategy: str
    reduction: str = "exact"
    prefetch: int = 1
    batch: int | None = None
    context: int | None = None
    transport: str = "mpi"
    width: int | None = None

    def sized(self) -> Workload:
        """Return the workload, changed to the batch, context and width of the line."""
        workload = WORKLOADS[self.workload]
        changed = {"batch": self.batch, "context": self.context, "width": self.width}
        return replace(workload, **{name: size for name, size in changed.items() if size is not None})


LINES = [
    Line("W1", 1, "full-shard", batch=1, context=64),  # hardly any computation, so that only links matter
    Line("W1", 1, "no-shard", batch=1, context=64),
    Line("W1", 2, "full-shard", batch=1, context=64),
    Line("W1", 2, "full-shard", batch=1, context=64, transport="auto"),
    Line("W1", 2, "hybrid-shard", batch=1, context=64, transport="auto"),
    Line("W1", 1, "full-shard"),
    Line("W1", 1, "full-shard", prefetch=0),
    Line("W1", 1, "full-shard", batch=2),
    Line("W1", 1, "shard-grad-op"),
    Line("W1", 1, "no-shard"),
    Line("W1", 1, "no-shard", "fast"),
    Line("W3", 1, "full-shard"),
    Line("W3", 1, "no-shard"),
    Line("W1", 2, "full-shard"),
    Line("W1", 2, "full-shard", transport="auto"),
]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description="Compare the plan's step times with runs on hosts with slow links.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rate", default="1gbit", help="speed of each host's link")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=tuple(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--steps", type=int, default=5, help="number of timed steps in a job")
    parser.add_argument("--lines", type=int, default=len(LINES), help="number of lines to run")
    return parser


# ------------------------------------------------------------------------------------- in a job: the probe


def probe(world: World, arguments: Sequence[str]) -> int:
    """Measure messages and matmuls on all ranks, and print the numbers."""
    set_threads(Config())  # as in a job: with more threads than cores, threads would wait for cores
    found = rates(world.mpi.COMM_WORLD, int(arguments[0]))
    if world.rank == 0:
        print(json.dumps(found))
    return 0


def rates(comm: object, per_host: int, large: int = LARGE, repeats: int = REPEATS) -> dict[str, float]:
    """Return seconds per message and per byte, between and inside hosts, and FLOP/s of a rank's matmuls."""
    found = {"alpha": exchange(comm, SMALL, comm.size // 2), "flops": products_per_second(comm)}
    found["beta"] = (exchange(comm, large, comm.size // 2, repeats) - found["alpha"]) / large * (1 / per_host)
    if per_host > 1:
        found["alpha_node"] = exchange(comm, SMALL, 1)
        found["beta_node"] = (exchange(comm, large, 1, repeats) - found["alpha_node"]) / large
    return found


def exchange(comm: object, nbytes: int, apart: int, repeats: int = REPEATS) -> float:
    """Return the seconds that all ranks need to swap `nbytes` with the rank `apart` away (best of several).

    The slowest rank's time counts, because the ranks of a host share its link and any of them may be first.
    """
    other = comm.rank ^ apart
    sent, theirs = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    took = []
    for _ in range(repeats + 1):
        comm.Barrier()
        begun = time.perf_counter()
        comm.Sendrecv(sent, other, 0, theirs, other, 0)
        took.append(time.perf_counter() - begun)
    return min(max(together) for together in list(zip(*comm.allgather(took), strict=True))[1:])


def products_per_second(comm: object) -> float:
    """Return the mean operations per second of a rank's matmuls, as in doctor, while all ranks compute."""
    comm.Barrier()
    return float(np.mean(comm.allgather(rate(PRODUCTS, square_product(np.float32)))))


# ------------------------------------------------------------------------------------------- outside: jobs


def compare(options: argparse.Namespace) -> Iterator[tuple[Line, dict[str, float], StepTime]]:
    """Yield (line, measurements of step.py, prediction of the plan) for every line."""
    sys.path[:0] = [str(TESTS), str(TESTS / "cluster")]
    from hosts import hosts
    from jobs import COMPILED

    chosen = [line for line in LINES[: options.lines] if line.workload in options.only]
    with hosts(options.hosts, options.rate) as here:

        def job(per_host: int, *arguments: str) -> dict[str, float]:
            ranks = options.hosts * per_host
            status, printed, errors = here.run(ranks, per_host, arguments, timeout=600, env=COMPILED)
            lines = [line for line in printed.splitlines() if line.startswith("{")]
            if status or not lines:
                raise SystemExit(f"{' '.join(arguments)} ended with {status}: {errors.strip()[-500:]}")
            return dict(json.loads(lines[-1]))

        for line in chosen:
            found = job(line.per_host, str(HERE / "plan_check.py"), "probe", str(line.per_host))
            measured = job(line.per_host, str(HERE / "step.py"), *step_flags(line, options.steps))
            yield line, measured | found, predicted(line, options.hosts, found)


def step_flags(line: Line, steps: int) -> list[str]:
    """Return the flags of step.py."""
    workload = line.sized()
    flags = ["--workload", line.workload, "--batch", workload.batch, "--context", workload.context]
    flags += ["--width", workload.width]
    flags += ["--strategy", line.strategy]
    flags += ["--reduction", line.reduction, "--prefetch", line.prefetch, "--transport", line.transport]
    return [*map(str, flags), "--warmup", "2", "--steps", str(steps), "--json"]


def predicted(line: Line, hosts: int, found: dict[str, float]) -> StepTime:
    """Return the plan's prediction for a line, based on the numbers of the probe."""
    return step_time(case_of(line, hosts), machine_of(found))


def machine_of(found: dict[str, float]) -> Machine:
    """Return a machine that has the numbers of the probe."""
    between = Link(found["alpha"], found["beta"])
    node = Link(found.get("alpha_node", 0.0), found.get("beta_node", 0.0))
    return Machine(node, between, flops=found["flops"], moves=found.get("moves", ASSUMED.moves))


def case_of(line: Line, hosts: int) -> Case:
    """Return the case to plan for a line."""
    workload, ranks = line.sized(), hosts * line.per_host
    return Case(
        ARCHITECTURES[workload.arch].from_flags(workload.flags),
        ranks=ranks,
        nodes=hosts,
        strategy_name=line.strategy,
        transport_wanted=line.transport,
        exact_wanted=line.reduction == "exact",
        batch_size=ranks * workload.batch,
        micro_batch=workload.batch,
        context=workload.context,
        prefetch=line.prefetch,
    )


def main(arguments: Sequence[str]) -> int:
    """Print the table. Return the exit status."""
    options = make_parser().parse_args(arguments)
    ratios = []
    print("| line | ranks | measured ms | plan ms | ratio | waits ms | plan | GFLOP/s | MB/s |")
    print(f"|{'---|' * 9}")
    for line, measured, plan in compare(options):
        ratios.append(1e3 * plan.seconds / measured["ms"])
        name = f"{line.workload} {line.strategy}, {line.transport} {line.reduction}, prefetch {line.prefetch}"
        name += f", {line.sized().batch} x {line.sized().context}"
        print(
            f"| {name} | {measured['ranks']} | {measured['ms']:.0f} | {1e3 * plan.seconds:.0f} "
            f"| {ratios[-1]:.2f} | {measured['wait_ms']:.0f} | {1e3 * plan.exposed:.0f} "
            f"| {measured['flops'] / 1e9:.0f} | {1e-6 / measured['beta']:.0f} |",
            flush=True,
        )
    within = sum(abs(ratio - 1) <= 0.25 for ratio in ratios)
    print(f"{within} of {len(ratios)} within 25 %")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["probe"]:
        run("plan_check probe", probe, sys.argv[2:])
    sys.exit(main(sys.argv[1:]))
