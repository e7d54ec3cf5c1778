"""Time our training step on one GPU, some steps each time a line on stdin asks for them.

    echo 20 | python benchmarks/gpu_step.py --workload gpt2-124m --precision bf16

A number on stdin is answered by a line of JSON with the milliseconds of so many steps; at the end of stdin a
last line tells memory. So two programs can be timed in turn on one GPU without starting again
(`gpu_torch.py` is asked in the same way). A step's time is that between two events of the GPU: it holds
whatever the GPU waits for. `--trace FILE` writes a time line of all kernels by torch's profiler, if torch is
there: CuPy has none that sees every kernel of a process.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from gpu_workloads import ALL
from step import micro_batch
from workloads import BATCHES, CLIP

from zero_mpi import GradAccum, SerialComm, ShardedModule, device, ops
from zero_mpi.cli.parser import Parser
from zero_mpi.config.settings import Config
from zero_mpi.device.arrays import pool_of
from zero_mpi.launch.world import World, run
from zero_mpi.models import ARCHITECTURES
from zero_mpi.nn import CrossEntropy
from zero_mpi.train.setup import layout_config, make_optimizer

WARM_UP = 4


def make_parser() -> Parser:
    """The command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=tuple(ALL), default="gpt2-124m")
    parser.add_argument("--batch", type=int, help="sequences, other than the workload's")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="bf16")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--offload", choices=("none", "moments"), default="none")
    parser.add_argument("--trace", metavar="FILE", help="write a time line of the steps asked for there")
    return parser


class Stepper:
    """A model in training, and the events between its steps."""

    def __init__(self, options: argparse.Namespace) -> None:
        workload = ALL[options.workload]
        self.workload = replace(workload, batch=options.batch or workload.batch)
        config = Config(precision=options.precision, recompute=options.recompute, offload=options.offload)
        model = ARCHITECTURES[workload.arch].from_flags(self.workload.flags)
        self.parameters = sum(param.size for param in model.params().values())
        layout, masters = vars(layout_config(config, model)), config.offload == "state"
        stages = model.stages(config.recompute)
        self.module = ShardedModule(stages, SerialComm(), **layout, offload_masters=masters)
        self.optimizer = make_optimizer(config, self.module, model)
        self.module.initialize(seed=0)
        self.accumulator = GradAccum(self.module, 1)
        data = [micro_batch(self.workload, 0, number) for number in range(BATCHES)]
        self.data = [tuple(np.ascontiguousarray(part) for part in pair) for pair in data]
        self.done = 0
        self.loss = 0.0

    def step(self) -> None:
        """One step as `train` does it."""
        x, targets = self.data[self.done % BATCHES]
        self.accumulator.accumulate(x, CrossEntropy(targets, 1.0 / self.workload.tokens))
        self.loss = self.accumulator.total_loss()
        self.optimizer.step(max_norm=CLIP)
        self.done += 1

    def timed(self, count: int) -> list[float]:
        """Milliseconds of each of `count` steps."""
        cuda = device.in_use().cupy.cuda
        events = [cuda.Event() for _ in range(count + 1)]
        stream = device.in_use().stream
        events[0].record(stream)
        for event in events[1:]:
            self.step()
            event.record(stream)
        events[-1].synchronize()
        return [cuda.get_elapsed_time(*pair) for pair in pairwise(events)]


def memory() -> dict[str, float]:
    """MiB: what CuPy took from the GPU; of it activations; what is used of the GPU by anybody."""
    cupy = device.in_use().cupy
    free, total = cupy.cuda.runtime.memGetInfo()
    return {
        "pool_mb": cupy.get_default_memory_pool().total_bytes() / 2**20,
        "activations_mb": pool_of(device.in_use()).stats().held / 2**20,
        "gpu_used_mb": (total - free) / 2**20,
    }


def counts() -> Iterator[int]:
    """What is asked for, until stdin ends."""
    for line in sys.stdin:
        if line.strip():
            yield int(line)


def say(**found: Any) -> None:
    """A line of JSON."""
    print(json.dumps(found), flush=True)


def traced(path: str, count: int, step: Callable[[], None]) -> dict[str, float]:
    """A time line of `count` steps, and the share of their time in which no kernel and no copy ran."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()  # the profiler itself begins in it
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
    """Of the last `seconds` of a time line: how long the GPU was busy, with how many kernels, and idle.

    Intervals of several streams are united before they are added.
    """
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in kinds)
    end = max((stop for _, stop in spans), default=0.0)
    begin = end - 1e6 * seconds
    busy, last = 0.0, begin
    counted = 0
    for start, stop in spans:
        if stop > begin:
            counted += 1
            busy += max(0.0, stop - max(start, last))
            last = max(last, stop)
    return {
        "seconds": seconds,
        "busy_seconds": busy / 1e6,
        "kernels": counted,
        "idle": 1 - busy / 1e6 / seconds,
    }


def command(world: World, arguments: Sequence[str]) -> int:
    """Answer until stdin ends."""
    options = make_parser().parse_args(arguments)
    device.use("cuda")
    ops.prepare()
    stepper = Stepper(options)
    for _ in range(WARM_UP):
        stepper.step()
    device.in_use().synchronize()
    say(ready=True, parameters=stepper.parameters, tokens=stepper.workload.tokens, loss=stepper.loss)
    for count in counts():
        if options.trace:
            say(**traced(options.trace, count, stepper.step))
        else:
            say(ms=stepper.timed(count))
    say(loss=stepper.loss, **memory())
    return 0


if __name__ == "__main__":
    run("step", command, sys.argv[1:], alone=True)
