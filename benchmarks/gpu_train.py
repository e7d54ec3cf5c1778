"""Trains on a GPU, or for losses also on a CPU: prints losses and a digest of the parameters, or times steps.

    mpirun -n 2 python benchmarks/gpu_train.py losses --run W3:fp32 W1:bf16 --device cuda --micro-batches 4
    echo 20 | python benchmarks/gpu_train.py steps --workload gpt2-124m --precision bf16

`losses` prints a line of JSON after each run. Micro-batches do not depend on the number of ranks, so in exact
mode losses, norms and digest do not either. Losses can be compared between devices and precisions.

`steps` answers each number N on stdin with a line of JSON, the milliseconds of N steps. At the end of stdin
it prints the memory in use. So two programs can take turns on a GPU without a restart (`gpu_torch.py` works
in the same way). The time of a step is that between two GPU events, so it includes all waits of the GPU.
`--trace` writes a timeline of all kernels with torch's profiler, if torch is installed, because CuPy has no
profiler that sees every kernel of a process.
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from step import micro_batch
from workloads import ALL, BATCHES, BETAS, CLIP, DECAY, EPS, LR, Workload

from zero_mpi import GradAccum, SerialComm, ShardedAdamW, ShardedModule, device, environment, ops
from zero_mpi.cli.parser import Parser
from zero_mpi.comm import Comm
from zero_mpi.config.bounds import check
from zero_mpi.config.settings import Config
from zero_mpi.device.arrays import pool_of
from zero_mpi.errors import UsageError
from zero_mpi.launch.world import World, run
from zero_mpi.models import ARCHITECTURES, ModelConfig
from zero_mpi.nn import CrossEntropy
from zero_mpi.sharding.precision import PRECISIONS
from zero_mpi.train.resolve import set_threads
from zero_mpi.train.setup import choose_transport, layout_config, make_optimizer

WARM_UP = 4
RATES = {"lr": LR, "beta1": BETAS[0], "beta2": BETAS[1], "eps": EPS, "weight_decay": DECAY}
RUNS = f"WORKLOAD:PRECISION, such as W3:fp32; workloads: {', '.join(ALL)}"


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("losses", "steps"))
    parser.add_argument("--offload", choices=("none", "moments"), default="none")
    losses, steps = map(parser.add_argument_group, ("losses", "steps"))
    losses.add_argument("--run", nargs="+", default=["W3:fp32"], help=RUNS)
    losses.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    losses.add_argument("--steps", type=int, default=20)
    losses.add_argument("--micro-batches", type=int, default=1, help="micro-batches per step, over all ranks")
    losses.add_argument("--transport", choices=("auto", "mpi", "staged", "nccl"), default="auto")
    losses.add_argument("--strategy", default="full-shard")
    losses.add_argument("--threads", help="threads per rank")
    steps.add_argument("--workload", choices=tuple(ALL), default="gpt2-124m")
    steps.add_argument("--batch", type=int, help="sequences per micro-batch (default: the workload's)")
    steps.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="bf16")
    steps.add_argument("--recompute", action="store_true")
    steps.add_argument("--trace", metavar="FILE", help="file for a timeline of the timed steps")
    return parser


def prepared(config: Config, model: ModelConfig, comm: Comm) -> tuple[ShardedModule, ShardedAdamW]:
    """Return an initialized model and its optimizer. Collective."""
    stages = model.stages(config.recompute)
    module = ShardedModule(stages, comm, **vars(layout_config(config, model)))
    optimizer = make_optimizer(config, module, model)
    module.initialize(seed=0)
    return module, optimizer


# -------------------------------------------------------------------------------------------------- losses


def train(
    module: ShardedModule, optimizer: ShardedAdamW, workload: Workload, options: argparse.Namespace
) -> Iterator[tuple[float, float]]:
    """Train. Yield the loss and the gradient norm of each step. Collective."""
    accumulator = GradAccum(module, options.micro_batches)
    tokens = options.micro_batches * workload.tokens
    for number in range(options.steps):
        for own in accumulator:
            if own is None:
                accumulator.accumulate(None)
                continue
            x, targets = micro_batch(workload, own, number % BATCHES)
            accumulator.accumulate(x, CrossEntropy(targets, 1.0 / tokens))
        loss = accumulator.total_loss()
        yield loss, optimizer.step(max_norm=CLIP).grad_norm


def digest(module: ShardedModule) -> str:
    """Return the sha256 of all parameters in float32. Collective."""
    total = hashlib.sha256()
    for name in module.params:
        full = device.in_use().to_host(module.all_gather_param(name))
        total.update(name.encode() + np.ascontiguousarray(full).tobytes())
    return total.hexdigest()


class Runs:
    """Runs that share one communicator, because creating it on a GPU may include a test of the MPI."""

    def __init__(self, world: World, options: argparse.Namespace) -> None:
        self.world, self.options = world, options
        self.comm: Comm | None = None
        self.notes: list[str] = []

    def measure(self, name: str) -> dict[str, Any]:
        """Train once. Return the line of results. Collective."""
        workload_name, _, precision = name.partition(":")
        if workload_name not in ALL or precision not in PRECISIONS:
            raise UsageError(f"--run {name}: expected {RUNS}")
        workload, options = ALL[workload_name], self.options
        transport = options.transport if options.device == "cuda" else "mpi"
        same = {name: getattr(options, name) for name in ("device", "strategy", "offload", "threads")}
        config = Config(precision=precision, transport=transport, **same, **RATES)
        check(config)
        model: ModelConfig = ARCHITECTURES[workload.arch].from_flags(workload.flags)
        begun = time.perf_counter()
        if self.comm is None:
            chosen = choose_transport(self.world, config, model, self.notes)
            self.comm = chosen.comm
            self.notes += [f"transport: {chosen.text}"] if chosen.text else []
        module, optimizer = prepared(config, model, self.comm)
        steps = list(train(module, optimizer, workload, options))
        found = {"run": name, "ranks": self.world.size, "device": device.in_use().about, "notes": self.notes}
        found |= {"losses": [loss for loss, _ in steps], "norms": [norm for _, norm in steps]}
        return found | {"digest": digest(module), "seconds": time.perf_counter() - begun}


def print_losses(world: World, options: argparse.Namespace) -> None:
    """Print a line with the results of each run. Collective."""
    set_threads(Config(threads=options.threads))
    number = world.node.rank
    world.run_on_all(lambda: device.use(options.device, number))
    world.node_by_node(ops.prepare)
    runs = Runs(world, options)
    for name in options.run:
        found = runs.measure(name)
        if world.rank == 0:
            print(json.dumps(found), flush=True)
    if runs.comm is not None:
        runs.comm.close()


# --------------------------------------------------------------------------------------------------- steps


class Stepper:
    """A model in training, whose steps are timed by GPU events."""

    def __init__(
        self, name: str, precision: str = "bf16", recompute: bool = False, offload: str = "none"
    ) -> None:
        workload = ALL[name]
        config = Config(precision=precision, recompute=recompute, offload=offload)
        model = ARCHITECTURES[workload.arch].from_flags(workload.flags)
        self.parameters = sum(param.size for param in model.params().values())
        self.module, self.optimizer = prepared(config, model, SerialComm())
        self.accumulator = GradAccum(self.module, 1)
        self.done, self.loss = 0, 0.0
        self.take(workload, workload.batch)

    def take(self, workload: Workload, batch: int) -> None:
        """Set the micro-batches of later steps to `batch` sequences."""
        self.workload = replace(workload, batch=batch)
        data = [micro_batch(self.workload, 0, number) for number in range(BATCHES)]
        self.data = [tuple(np.ascontiguousarray(part) for part in pair) for pair in data]

    def step(self) -> None:
        """Run the same step as `train` does."""
        x, targets = self.data[self.done % BATCHES]
        self.accumulator.accumulate(x, CrossEntropy(targets, 1.0 / self.workload.tokens))
        self.loss = self.accumulator.total_loss()
        self.optimizer.step(max_norm=CLIP)
        self.done += 1

    def warm_up(self) -> None:
        """Run some steps without timing them."""
        for _ in range(WARM_UP):
            self.step()
        device.in_use().synchronize()

    def timed(self, count: int) -> list[float]:
        """Run `count` steps. Return the milliseconds of each step."""
        return milliseconds(self.step, count)


def milliseconds(work: Callable[[], Any], count: int) -> list[float]:
    """Call `work()` `count` times. Return the milliseconds between the GPU events around each call."""
    cuda, stream = device.in_use().cupy.cuda, device.in_use().stream
    events = [cuda.Event() for _ in range(count + 1)]
    events[0].record(stream)
    for event in events[1:]:
        work()
        event.record(stream)
    events[-1].synchronize()
    return [cuda.get_elapsed_time(*pair) for pair in pairwise(events)]


def memory() -> dict[str, float]:
    """Return memory in MiB: allocated by CuPy, peak of activations, used on the GPU by all processes."""
    cupy = device.in_use().cupy
    free, total = cupy.cuda.runtime.memGetInfo()
    return {
        "pool_mb": cupy.get_default_memory_pool().total_bytes() / 2**20,
        "activations_mb": pool_of(device.in_use()).nbytes / 2**20,
        "gpu_used_mb": (total - free) / 2**20,
    }


def say(**found: Any) -> None:
    """Print the arguments as a line of JSON."""
    print(json.dumps(found), flush=True)


def traced(path: str, count: int, step: Callable[[], None]) -> dict[str, float]:
    """Write a timeline of one step and `count` more. Return `idle_share` of those `count` steps."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()  # the profiler, which starts here, disturbs this step
        device.in_use().synchronize()
        begun = time.perf_counter()
        for _ in range(count):
            step()
        device.in_use().synchronize()
        seconds = time.perf_counter() - begun
    profiler.export_chrome_trace(path)
    with open(path) as file:
        return idle_share(json.load(file)["traceEvents"], seconds)


def idle_share(events: list[dict[str, Any]], seconds: float) -> dict[str, float]:
    """Return the busy time, number of kernels and copies, and idle share of the last `seconds` of a timeline.

    Intervals of different streams are united before their lengths are added.
    """
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in kinds)
    end = max((stop for _, stop in spans), default=0.0)
    begin = end - 1e6 * seconds
    busy, last, counted = 0.0, begin, 0
    for start, stop in spans:
        if stop > begin:
            counted += 1
            busy += max(0.0, stop - max(start, last))
            last = max(last, stop)
    busy /= 1e6
    return {"seconds": seconds, "busy_seconds": busy, "kernels": counted, "idle": 1 - busy / seconds}


def time_steps(options: argparse.Namespace) -> None:
    """Answer each number on stdin with the times of that number of steps, until stdin ends."""
    device.use("cuda")
    ops.prepare()
    stepper = Stepper(options.workload, options.precision, options.recompute, options.offload)
    stepper.take(stepper.workload, options.batch or stepper.workload.batch)
    stepper.warm_up()
    say(ready=True, parameters=stepper.parameters, tokens=stepper.workload.tokens, loss=stepper.loss)
    for count in map(int, filter(str.strip, sys.stdin)):
        if options.trace:
            say(**traced(options.trace, count, stepper.step))
        else:
            say(ms=stepper.timed(count))
    say(loss=stepper.loss, **memory())


def command(world: World, arguments: Sequence[str]) -> int:
    """Print losses or time steps, as the command line says. Return the exit status."""
    options = world.run_on_all(lambda: make_parser().parse_args(arguments))
    if options.what == "losses":
        print_losses(world, options)
    elif world.size > 1:
        raise UsageError("gpu_train.py steps runs in one process")
    else:
        time_steps(options)
    return 0


if __name__ == "__main__":
    run("train", command, sys.argv[1:], alone=not environment.under_launcher())
