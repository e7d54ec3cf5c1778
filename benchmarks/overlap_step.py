"""The job of overlap.py: times the parts of a FULL_SHARD step on the ranks it runs on, in turns.

    mpirun -f HOSTS -n 2 python benchmarks/overlap_step.py --layers 12 --batch 3

step          a training step as it is
at once       the same step with every transfer waited for where it is started
computation   the same step with transfers left out
transfers     the gathers and reductions of a step, in their order and by the same code, nothing computed

With --asleep no block computes: it sleeps, as a processor does while a device computes. That shows what the
order of transfers hides by itself, whatever else runs on the cores.

Prints one JSON object: medians over steps of the slowest rank in milliseconds, `hidden` = (computation +
transfers - step) / the smaller of the two, `wait` of a step, `sent` megabytes of a rank in a step.
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

# Few tokens a rank, so that a link of 1 Gbit takes about as long as the products.
LLAMA = replace(WORKLOADS["W1"], layers=12, batch=3)
WAYS = ("step", "at once", "computation", "transfers")


class StagedComm(MPIComm):
    """Communicator with normal transfers, transfers that are awaited at once, or none."""

    at_once = left_out = False

    def allgather(self, shard: Array | None, full: Array, partition: Partition, label: str = "") -> Handle:
        if not self.left_out:
            return self._staged(super().allgather(shard, full, partition, label))
        if shard is not None:  # the rest keeps what an earlier gather brought
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
        assert not accumulate, "a step of one round adds to nothing"
        out[...] = full[partition.part(self.rank)]
        return DONE

    def allreduce(self, array: Array, label: str = "") -> Handle:
        return DONE if self.left_out else self._staged(super().allreduce(array, label))

    def _staged(self, handle: Handle) -> Handle:
        if self.at_once:
            handle.wait()
        return handle


class Asleep(Layer):
    """Replacement of a block with the same parameters and shapes; it sleeps, twice as long in backward."""

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
    """Model on its ranks, and the times of its steps in each way."""

    comm: StagedComm
    workload: Workload
    prefetch: int
    asleep: float | None  # seconds for the forward of a block
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
        """Make a full training step."""
        x, targets = micro_batch(self.workload, self.comm.rank, number % BATCHES)
        tokens = self.comm.size * self.workload.tokens
        self.accumulator.accumulate(x, CrossEntropy(targets, 1.0 / tokens))
        self.accumulator.total_loss()
        self.optimizer.step(max_norm=CLIP)

    def transfers(self) -> None:
        """Run the gathers and reductions of a step, like a rank without a micro-batch."""
        self.module.forward_backward(None, None, 1.0, contributors=self.comm.size)
        self.module.sync_gradients()
        self.module.zero_gradients()
        self.module.drop_gathered()

    def round(self, number: int, timed: bool = True) -> None:
        """Run each way once."""
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
        """Run `action` on all ranks at once."""
        self.comm.barrier()
        begun = time.perf_counter()
        action()
        if timed:
            self.seconds[way].append(time.perf_counter() - begun)

    def result(self) -> dict[str, float]:
        """Return the milliseconds of each way, and the figures computed from them."""
        assert self.optimizer.skipped == 0, "a step without an update is not the one to be timed"
        ms = {way: 1e3 * median_of_longest(self.comm, values) for way, values in self.seconds.items()}
        computation, transfers = ms["computation"], ms["transfers"]
        return ms | {
            "hidden": (computation + transfers - ms["step"]) / min(computation, transfers),
            "wait": 1e3 * median_of_longest(self.comm, self.waits),
            "sent": max(self.comm.allgather_object(self.sent)) / 1e6,
            "ranks": self.comm.size,
        }


def sleeping(stage: Stage, seconds: float) -> Stage:
    """Return a sleeping block for a block; return any other stage unchanged."""
    return replace(stage, layer=Asleep(stage.layer, seconds)) if stage.scope.startswith("blk.") else stage


def median_of_longest(comm: Comm, values: Sequence[float]) -> float:
    """Return the median over steps of the longest time of all ranks."""
    return statistics.median(max(together) for together in zip(*comm.allgather_object(values), strict=True))


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="mpirun -n N python benchmarks/overlap_step.py",
        description="Time the parts of a step.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for size in SIZES:
        parser.add_argument(f"--{size}", type=int, default=getattr(LLAMA, size), help="of the llama")
    parser.add_argument("--prefetch", type=int, default=1)
    parser.add_argument("--asleep", type=float, metavar="MS", help="what a block sleeps in forward")
    parser.add_argument("--warmup", type=int, default=2, help="rounds that are not timed")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each way")
    return parser


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Measure the steps of this job and return the result."""
    workload = replace(LLAMA, **{size: getattr(options, size) for size in SIZES})
    asleep = None if options.asleep is None else options.asleep / 1e3
    bench = Bench(StagedComm(), workload, options.prefetch, asleep)
    for number in range(options.warmup):
        bench.round(number, timed=False)
    for number in range(options.steps):
        bench.round(number)
    return bench.result()


def command(world: World, arguments: Sequence[str]) -> int:
    """Measure and print the result."""
    options = world.run_on_all(lambda: make_parser().parse_args(arguments))
    set_threads(Config())
    result = measure(options)
    if world.rank == 0:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    run("overlap_step", command, sys.argv[1:])
