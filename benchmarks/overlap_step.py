"""The job that overlap.py starts: times the parts of a FULL_SHARD step on all ranks, in turns.

    mpirun -f HOSTS -n 2 python benchmarks/overlap_step.py --layers 12 --batch 3

step          a normal training step
at once       the same step, but each transfer is awaited where it is started
computation   the same step without transfers
transfers     the gathers and reductions of a step, in their order, without computation

With --asleep, a block does not compute but sleeps, as a processor does while a device computes. This shows
how much transfer time a schedule can hide when transfers do not compete with computation for the cores.

Prints one JSON object with medians over steps, in milliseconds of the slowest rank: `hidden` = (computation +
transfers - step) / min(computation, transfers); `wait` is the waiting time in a step; `sent` is the most MB
that a rank sends in a step.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from step import SIZES, micro_batch
from workloads import BATCHES, BETAS, CLIP, DECAY, EPS, LR, WORKLOADS, Workload

from zero_mpi import FULL_SHARD, Comm, GradAccum, MPIComm, Partition, ShardedAdamW, ShardedModule
from zero_mpi.cli.parser import Parser
from zero_mpi.comm import DONE, Handle
from zero_mpi.config.settings import Config
from zero_mpi.device.types import Array
from zero_mpi.launch.world import World, run
from zero_mpi.models import ARCHITECTURES
from zero_mpi.nn import CrossEntropy
from zero_mpi.nn.layer import Gradients, Layer, Param, Stage, Weights
from zero_mpi.train.resolve import set_threads

# There are few tokens per rank, so that transfers over a link of 1 Gbit/s take about as long as the matmuls.
LLAMA = replace(WORKLOADS["W1"], layers=12, batch=3)
WAYS = ("step", "at once", "computation", "transfers")


class StagedComm(MPIComm):
    """Communicator whose transfers are normal, awaited immediately, or left out."""

    at_once = left_out = False

    def allgather(self, shard: Array | None, full: Array, partition: Partition, label: str = "") -> Handle:
        if not self.left_out:
            return self._staged(super().allgather(shard, full, partition, label))
        if shard is not None:  # the other shards stay as an earlier gather left them
            full[partition.part(self.rank)] = shard
        return DONE

    def reduce_scatter(
        self,
        full: Array,
        out: Array,
        partition: Partition,
        *,
        contributors: int | None = None,
        accumulate: bool = False,
        label: str = "",
    ) -> Handle:
        if not self.left_out:
            handle = super().reduce_scatter(
                full, out, partition, contributors=contributors, accumulate=accumulate, label=label
            )
            return self._staged(handle)
        assert not accumulate, "a step has one round, so there is no earlier sum"
        out[...] = full[partition.part(self.rank)]
        return DONE

    def allreduce(self, array: Array, label: str = "") -> Handle:
        return DONE if self.left_out else self._staged(super().allreduce(array, label))

    def _staged(self, handle: Handle) -> Handle:
        if self.at_once:
            handle.wait()
        return handle


class Asleep(Layer):
    """Layer that has the parameters and shapes of a block but only sleeps: twice as long in backward."""

    def __init__(self, block: Layer, seconds: float) -> None:
        self._block, self._seconds = block, seconds

    def params(self) -> dict[str, Param]:
        return self._block.params()

    def forward(self, p: Weights, x: Array) -> tuple[Array, None]:
        time.sleep(self._seconds)
        return x, None

    def backward(self, p: Weights, saved: None, dy: Array, g: Gradients) -> Array:
        time.sleep(2 * self._seconds)
        return dy


@dataclass
class Bench:
    """A model on its ranks, and the times of its steps in each of WAYS."""

    comm: StagedComm
    workload: Workload
    prefetch: int
    asleep: float | None  # seconds that a block sleeps in forward
    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    waits: list[float] = field(default_factory=list)
    sent: int = 0

    def __post_init__(self) -> None:
        model = ARCHITECTURES[self.workload.arch].from_flags(self.workload.flags)
        stages = model.stages()
        if self.asleep is not None:
            stages = [sleeping(stage, self.asleep) for stage in stages]
        self.module = ShardedModule(stages, self.comm, FULL_SHARD, prefetch=self.prefetch)
        self.module.initialize(seed=0)
        self.optimizer = ShardedAdamW(self.module, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
        self.accumulator = GradAccum(self.module, self.comm.size)

    def step(self, number: int) -> None:
        """Run a complete training step."""
        x, targets = micro_batch(self.workload, self.comm.rank, number % BATCHES)
        tokens = self.comm.size * self.workload.tokens
        self.accumulator.accumulate(x, CrossEntropy(targets, 1.0 / tokens))
        self.accumulator.total_loss()
        self.optimizer.step(max_norm=CLIP)

    def transfers(self) -> None:
        """Run only the gathers and reductions of a step, as a rank without micro-batches does."""
        self.module.forward_backward(None, None, 1.0, contributors=self.comm.size)
        self.module.sync_gradients()
        self.module.zero_gradients()
        self.module.drop_gathered()

    def round(self, number: int, timed: bool = True) -> None:
        """Run and time each of WAYS once."""
        meter = self.comm.meter
        waited, sent = meter.wait_seconds, meter.sent_bytes
        self.time("step", lambda: self.step(number), timed)
        if timed:
            self.waits.append(meter.wait_seconds - waited)
            self.sent = meter.sent_bytes - sent
        self.comm.at_once = True
        self.time("at once", lambda: self.step(number), timed)
        self.comm.at_once, self.comm.left_out = False, True
        self.time("computation", lambda: self.step(number), timed)
        self.comm.left_out = False
        self.time("transfers", self.transfers, timed)

    def time(self, way: str, action: Callable[[], None], timed: bool) -> None:
        """Run `action` on all ranks at the same time. Record its seconds if `timed`."""
        self.comm.barrier()
        begun = time.perf_counter()
        action()
        if timed:
            self.seconds[way].append(time.perf_counter() - begun)

    def result(self) -> dict[str, float]:
        """Return milliseconds of each of WAYS, hidden share, wait, MB sent and ranks."""
        assert self.optimizer.skipped == 0, "a step that skips its update must not be timed"
        ms = {way: 1e3 * median_of_longest(self.comm, values) for way, values in self.seconds.items()}
        computation, transfers = ms["computation"], ms["transfers"]
        return ms | {
            "hidden": (computation + transfers - ms["step"]) / min(computation, transfers),
            "wait": 1e3 * median_of_longest(self.comm, self.waits),
            "sent": max(self.comm.allgather_object(self.sent)) / 1e6,
            "ranks": self.comm.size,
        }


def sleeping(stage: Stage, seconds: float) -> Stage:
    """Return a sleeping block in place of a block. Return any other stage unchanged."""
    return replace(stage, layer=Asleep(stage.layer, seconds)) if stage.scope.startswith("blk.") else stage


def median_of_longest(comm: Comm, values: Sequence[float]) -> float:
    """Return the median over steps of the longest time of any rank."""
    return statistics.median(max(together) for together in zip(*comm.allgather_object(values), strict=True))


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="mpirun -n N python benchmarks/overlap_step.py",
        description="Time the parts of a FULL_SHARD step.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for size in SIZES:
        parser.add_argument(f"--{size}", type=int, default=getattr(LLAMA, size), help="size of the llama")
    parser.add_argument("--prefetch", type=int, default=1)
    parser.add_argument("--asleep", type=float, metavar="MS", help="ms that a block sleeps in forward")
    parser.add_argument("--warmup", type=int, default=2, help="number of rounds that are not timed")
    parser.add_argument("--steps", type=int, default=10, help="number of timed rounds")
    return parser


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Measure the steps of this job. Return the result."""
    workload = replace(LLAMA, **{size: getattr(options, size) for size in SIZES})
    asleep = None if options.asleep is None else options.asleep / 1e3
    bench = Bench(StagedComm(), workload, options.prefetch, asleep)
    for number in range(options.warmup):
        bench.round(number, timed=False)
    for number in range(options.steps):
        bench.round(number)
    return bench.result()


def command(world: World, arguments: Sequence[str]) -> int:
    """Measure, and print the result."""
    options = world.run_on_all(lambda: make_parser().parse_args(arguments))
    set_threads(Config())
    result = measure(options)
    if world.rank == 0:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    run("overlap_step", command, sys.argv[1:])
