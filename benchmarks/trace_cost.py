"""Measures the cost of a timeline: times training steps with and without it, and the recording of one span.

    mpirun -n 2 python benchmarks/trace_cost.py --workload W3 --rounds 20

Steps with and without a timeline take turns in short blocks. `with/without` is the ratio of the medians of
the slowest rank's steps. Collective work for a timeline (clocks, writing) happens between steps and is not
part of them. The last line has the number of spans and transfers per step, the time to record one span, and
their product as a share of a step. On a GPU, it leaves out the cost of events that serve as time stamps.
"""

import statistics
import sys
import tempfile
import time
from argparse import ArgumentDefaultsHelpFormatter, Namespace
from collections.abc import Sequence
from pathlib import Path

from step import STRATEGIES, Run, make_runs, median_of_longest
from workloads import WORKLOADS

from zero_mpi import device, tracing
from zero_mpi.cli.parser import Parser
from zero_mpi.config.settings import Config
from zero_mpi.launch.world import World, run
from zero_mpi.telemetry import spans
from zero_mpi.train.resolve import set_threads

LOOPS = 20_000


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="mpirun -n N python benchmarks/trace_cost.py",
        description="Time steps with and without a timeline.",
        formatter_class=ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--workload", choices=tuple(WORKLOADS), default="W3")
    parser.add_argument("--strategy", choices=STRATEGIES, default="full-shard")
    parser.add_argument("--transport", choices=("auto", "mpi", "shared"), default="auto")
    parser.add_argument("--warmup", type=int, default=3, help="number of steps that are not timed")
    parser.add_argument("--steps", type=int, default=5, help="number of steps in a block")
    parser.add_argument(
        "--rounds", type=int, default=10, help="number of blocks with a timeline, and as many without"
    )
    return parser


def variant(world: World, options: Namespace) -> Run:
    """Return the run whose steps are timed."""
    sizes = dict.fromkeys(("vocabulary", "layers", "width", "heads", "ffn", "context", "batch"))
    chosen = {"strategy": [options.strategy], "transport": [options.transport], "reduction": ["exact"]}
    chosen["precision"] = ["fp32"]
    more = {"workload": options.workload, "prefetch": 1, "recompute": False}
    return next(make_runs(world, Namespace(**sizes, **chosen, **more)))


def measure(bench: Run, options: Namespace, folder: Path) -> tuple[list[float], list[float], list[float]]:
    """Return seconds of steps without a timeline, seconds with it, and spans and transfers per step."""
    without: list[float] = []
    watched: list[float] = []
    counts: list[float] = []
    for number in range(options.warmup):
        bench.step(number)
    for _ in range(options.rounds):
        bench.seconds = without
        for number in range(options.steps):
            bench.timed_step(number)
        bench.seconds = watched
        with tracing(bench.comm, folder / "trace.json.gz") as timeline:
            for number in range(options.steps):
                timeline.step(number + 1)
                bench.timed_step(number)
        recorder = timeline.recorder
        counts.append((len(recorder.spans) + len(recorder.transfers)) / options.steps)
    return without, watched, counts


def cost_of_a_span() -> float:
    """Return the seconds that it takes to record one span."""
    recorder = spans.SpanRecorder(device.HOST.stopwatch())
    begun = time.perf_counter()
    for _ in range(LOOPS):
        recorder.lap(spans.COMPUTE, "forward", "blk.0")
    return (time.perf_counter() - begun) / LOOPS


def command(world: World, arguments: Sequence[str]) -> int:
    """Measure the costs and print them. Return the exit status."""
    options = world.run_on_all(lambda: make_parser().parse_args(arguments))
    set_threads(Config())
    bench = variant(world, options)
    with tempfile.TemporaryDirectory() as folder:
        without, watched, counts = measure(bench, options, Path(folder))
    off, on = (1e3 * median_of_longest(bench.comm, values) for values in (without, watched))
    spans_a_step = max(bench.comm.allgather_object(statistics.median(counts)))
    cost = statistics.median(bench.comm.allgather_object(cost_of_a_span()))
    if world.rank == 0:
        print(f"{options.workload}, {bench.comm.size} rank(s), {' '.join(bench.name)}")
        print(f"without {off:8.3f} ms per step")
        print(f"with    {on:8.3f} ms per step, with/without {on / off:.4f}")
        print(
            f"{spans_a_step:.0f} spans per step of {1e9 * cost:.0f} ns each: "
            f"{100 * spans_a_step * cost * 1e3 / off:.3f} % of a step"
        )
    return 0


if __name__ == "__main__":
    run("trace_cost", command, sys.argv[1:])
