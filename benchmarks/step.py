"""Measures a training step: tokens per second, share of the sgemm peak, waits, bytes sent, memory.

    mpirun -n 2 python benchmarks/step.py --workload W1 --strategy full-shard no-shard --transport auto

The variants take turns, round by round. The table shows medians of the slowest rank's steps. The peak is the
speed of matmuls of 1024 x 1024 matrices on all ranks at once, measured in the same run. GEMM share: the time
that the step's matmuls with weights would take at that peak, divided by the time of the step. Wait: waiting
time of the rank that waits longest. Memory is measured per process, so run one variant alone for it: peak RSS
of the largest rank, PSS of all ranks (shared memory counts once), and the largest activations of a rank.
"""

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import numpy as np
from workloads import BATCHES, BETAS, CLIP, DECAY, EPS, LR, WORKLOADS, Workload

from zero_mpi import Comm, GradAccum, ShardedAdamW, ShardedModule, ops
from zero_mpi.cli.parser import Parser
from zero_mpi.config.settings import Config
from zero_mpi.device.arrays import RECYCLED
from zero_mpi.environment import portable
from zero_mpi.launch.consistency import check_pins
from zero_mpi.launch.world import World, run
from zero_mpi.models import ARCHITECTURES
from zero_mpi.nn import CrossEntropy
from zero_mpi.sharding.precision import PRECISIONS, precision_named
from zero_mpi.sharding.strategy import strategy_named
from zero_mpi.train.resolve import set_threads
from zero_mpi.train.setup import choose_transport

GEMM = 1024
STRATEGIES = ("full-shard", "shard-grad-op", "no-shard", "hybrid-shard")
SIZES = ("vocabulary", "layers", "width", "heads", "ffn", "context", "batch")


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="mpirun -n N python benchmarks/step.py",
        description="Time training steps.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--workload", choices=tuple(WORKLOADS), default="W1")
    for size in SIZES:
        parser.add_argument(f"--{size}", type=int, help="size to use instead of the workload's")
    parser.add_argument("--strategy", nargs="+", choices=STRATEGIES, default=["full-shard"])
    parser.add_argument("--transport", nargs="+", choices=("auto", "mpi", "shared"), default=["auto"])
    parser.add_argument("--reduction", nargs="+", choices=("exact", "fast"), default=["exact"])
    parser.add_argument("--precision", nargs="+", choices=tuple(PRECISIONS), default=["fp32"])
    parser.add_argument(
        "--bits", choices=portable.CHOICES, default=portable.requested(), help="kernels of all variants"
    )
    parser.add_argument("--prefetch", type=int, default=1)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--threads", help="threads per rank, or auto")
    parser.add_argument("--warmup", type=int, default=3, help="number of steps that are not timed")
    parser.add_argument("--steps", type=int, default=10, help="timed steps per variant and round")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of all variants")
    parser.add_argument("--json", action="store_true", help="print one JSON object per variant")
    return parser


@dataclass
class Run:
    """A variant: its names, its model and optimizer, and the costs of its steps."""

    name: tuple[str, str, str]
    comm: Comm
    module: ShardedModule
    optimizer: ShardedAdamW
    accumulator: GradAccum
    workload: Workload
    seconds: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    sent: int = 0  # bytes that this rank sent in the last step

    def timed_step(self, number: int) -> None:
        """Run one step on all ranks at the same time, and record its costs."""
        self.comm.barrier()
        meter = self.comm.meter
        waited, sent, begun = meter.wait_seconds, meter.sent_bytes, time.perf_counter()
        self.step(number)
        self.seconds.append(time.perf_counter() - begun)
        self.waits.append(meter.wait_seconds - waited)
        self.sent = meter.sent_bytes - sent

    def step(self, number: int) -> float:
        """Run one step. Return the loss."""
        comm, workload = self.comm, self.workload
        tokens, targets = micro_batch(workload, comm.rank, number % BATCHES)
        self.accumulator.accumulate(tokens, CrossEntropy(targets, 1.0 / (comm.size * workload.tokens)))
        loss = self.accumulator.total_loss()
        self.optimizer.step(max_norm=CLIP)
        return loss


def micro_batch(workload: Workload, rank: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random tokens and targets, (batch, context) each."""
    shape = (workload.batch, workload.context + 1)
    drawn = np.random.default_rng((rank, number)).integers(workload.vocabulary, size=shape)
    return drawn[:, :-1], drawn[:, 1:]


def sized(options: argparse.Namespace) -> Workload:
    """Return the workload, with sizes changed as the flags say."""
    changed = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    return replace(WORKLOADS[options.workload], **changed)


def make_runs(world: World, options: argparse.Namespace) -> Iterator[Run]:
    """Yield a run for each variant that the flags select."""
    workload = sized(options)
    model = ARCHITECTURES[workload.arch].from_flags(workload.flags)
    axes = options.transport, options.reduction, options.strategy, options.precision
    for transport, reduction, strategy, precision in product(*axes):
        config = Config(
            transport=transport,
            reduction=reduction,
            strategy=strategy,
            precision=precision,
            prefetch=options.prefetch,
            recompute=options.recompute,
        )
        comm = choose_transport(world, config, model, []).comm
        stages = model.stages(options.recompute)
        low = precision_named(precision)
        module = ShardedModule(
            stages, comm, strategy_named(strategy), prefetch=options.prefetch, precision=low
        )
        module.initialize(seed=0)
        optimizer = ShardedAdamW(module, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
        accumulator = GradAccum(module, comm.size)
        yield Run((strategy, transport, reduction, precision), comm, module, optimizer, accumulator, workload)


def gemm_rate(comm: Comm, repeats: int = 7) -> float:
    """Return the slowest rank's best operations per second in an sgemm while all ranks compute."""
    a, b, c = (np.ones((GEMM, GEMM), np.float32) for _ in range(3))
    best = 0.0
    for _ in range(repeats):
        comm.barrier()
        begun = time.perf_counter()
        ops.linear_backward_x(a, b, c)
        best = max(best, 2 * GEMM**3 / (time.perf_counter() - begun))
    return min(comm.allgather_object(best))


def measure(world: World, options: argparse.Namespace) -> list[dict[str, object]]:
    """Measure all variants. Return a result for each of them."""
    runs = list(make_runs(world, options))
    peak = 0.0
    for variant in runs:
        for number in range(options.warmup):
            variant.step(number)
    for _ in range(options.rounds):
        peak = max(peak, gemm_rate(runs[0].comm))
        for variant in runs:
            for number in range(options.steps):
                variant.timed_step(number)
    memory = runs[0].comm.allgather_object((peak_rss(), pss(), RECYCLED.nbytes / 2**20))
    return [result(variant, peak, memory) for variant in runs]


def peak_rss() -> float:
    """Return the peak memory of this process, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def pss() -> float:
    """Return this process's memory in MiB. A page that n processes share counts as 1/n of its size."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(text.partition("Pss:")[2].split()[0]) / 1024


def median_of_longest(comm: Comm, values: list[float]) -> float:
    """Return the median over steps of the longest time of any rank."""
    return statistics.median(max(together) for together in zip(*comm.allgather_object(values), strict=True))


def result(variant: Run, peak: float, memory: list[tuple[float, float, float]]) -> dict[str, object]:
    """Return the result of a variant, which is a line of the table."""
    comm, workload = variant.comm, variant.workload
    slowest = median_of_longest(comm, variant.seconds)
    return {
        "strategy": variant.name[0],
        "transport": variant.name[1],
        "reduction": variant.name[2],
        "precision": variant.name[3],
        "bits": portable.PORTABLE if portable.active else portable.NATIVE,
        "ranks": variant.comm.size,
        "ms": 1e3 * slowest,
        "tokens_per_second": variant.comm.size * workload.tokens / slowest,
        "gemm_share": workload.gemm_flop / peak / slowest,
        "peak_gflops": peak / 1e9,
        "wait_ms": 1e3 * median_of_longest(comm, variant.waits),
        "sent_mb": max(comm.allgather_object(variant.sent)) / 1e6,
        "rss_mb": max(rss for rss, _, _ in memory),
        "pss_of_all_mb": sum(pss for _, pss, _ in memory),
        "activations_mb": max(held for _, _, held in memory),
    }


def command(world: World, arguments: Sequence[str]) -> int:
    """Measure and print the table."""
    options = world.run_on_all(lambda: make_parser().parse_args(arguments))
    set_threads(Config(threads=options.threads))
    if options.bits == portable.PORTABLE:
        world.run_on_all(check_pins)
    results = measure(world, options)
    if world.rank == 0:
        for line in results if options.json else ():
            print(json.dumps({"workload": options.workload, **line}))
        if not options.json:
            print_table(options.workload, results)
    return 0


def print_table(workload: str, results: list[dict[str, object]]) -> None:
    """Print the results as a table."""
    head = results[0]
    print(f"{workload}, {head['ranks']} rank(s), sgemm {head['peak_gflops']:.0f} GFLOP/s per rank")
    names = f"{'strategy':14} {'transport':10} {'reduction':10} {'precision':9} {'bits':8}"
    columns = f"{'ms':>9} {'tokens/s':>9} {'GEMM share':>10} {'wait ms':>8} {'sent MB':>8} {'RSS MB':>7}"
    print(f"{names} {columns} {'PSS of all':>10} {'activations':>11}")
    for line in results:
        print(
            f"{line['strategy']:14} {line['transport']:10} {line['reduction']:10} {line['precision']:9} "
            f"{line['bits']:8} "
            f"{line['ms']:9.1f} "
            f"{line['tokens_per_second']:9.0f} {line['gemm_share']:10.2f} {line['wait_ms']:8.1f} "
            f"{line['sent_mb']:8.1f} {line['rss_mb']:7.0f} {line['pss_of_all_mb']:10.0f} "
            f"{line['activations_mb']:11.0f}"
        )


if __name__ == "__main__":
    portable.claim(portable.flag_of(sys.argv[1:]))
    run("step", command, sys.argv[1:])
