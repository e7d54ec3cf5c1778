"""Train some steps and print losses, norms and a digest of the parameters: on the CPU or GPUs, on any ranks.

    mpirun -n 2 python benchmarks/gpu_losses.py --run W3:fp32 W1:bf16 --device cuda --micro-batches 4

A line of JSON for each run, as soon as it is done. Micro-batches are the same for any number of ranks, so in
exact mode all of a line is; between devices and precisions the losses can be compared.
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from gpu_workloads import ALL
from step import micro_batch
from workloads import BATCHES, BETAS, CLIP, DECAY, EPS, LR, Workload

from zero_mpi import GradAccum, ShardedAdamW, ShardedModule, device, environment, ops
from zero_mpi.cli.parser import Parser
from zero_mpi.comm import Comm
from zero_mpi.config.bounds import check
from zero_mpi.config.settings import Config
from zero_mpi.errors import UsageError
from zero_mpi.launch.world import World, run
from zero_mpi.models import ARCHITECTURES, ModelConfig
from zero_mpi.nn import CrossEntropy
from zero_mpi.sharding.precision import PRECISIONS
from zero_mpi.train.resolve import set_threads
from zero_mpi.train.setup import choose_transport, layout_config, make_optimizer

TRANSPORTS = ("auto", "mpi", "staged", "nccl")


def make_parser() -> Parser:
    """The command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="+", default=["W3:fp32"], help=f"of {', '.join(ALL)}, and a precision")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--micro-batches", type=int, default=1, help="a step, over all ranks")
    parser.add_argument("--transport", choices=TRANSPORTS, default="auto")
    parser.add_argument("--strategy", default="full-shard")
    parser.add_argument("--offload", choices=("none", "moments"), default="none")
    parser.add_argument("--threads", help="threads a rank")
    return parser


def settings(options: argparse.Namespace, precision: str) -> Config:
    """The flags of a run."""
    config = Config(
        device=options.device,
        precision=precision,
        transport=options.transport if options.device == "cuda" else "mpi",
        strategy=options.strategy,
        offload=options.offload,
        threads=options.threads,
        lr=LR,
        beta1=BETAS[0],
        beta2=BETAS[1],
        eps=EPS,
        weight_decay=DECAY,
    )
    check(config)
    return config


def train(
    module: ShardedModule, optimizer: ShardedAdamW, workload: Workload, options: argparse.Namespace
) -> Iterator[tuple[float, float]]:
    """Loss and norm of each step. Collective."""
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
    """sha256 of all parameters, float32. Collective."""
    total = hashlib.sha256()
    for name in module.params:
        whole = device.in_use().to_host(module.all_gather_param(name))
        total.update(name.encode() + np.ascontiguousarray(whole).tobytes())
    return total.hexdigest()


class Runs:
    """Runs over one transport, which is made once: on a GPU that may begin with a live test."""

    def __init__(self, world: World, options: argparse.Namespace) -> None:
        self.world, self.options = world, options
        self.comm: Comm | None = None
        self.notes: list[str] = []

    def measure(self, name: str) -> dict[str, Any]:
        """One run. Collective."""
        workload_name, _, precision = name.partition(":")
        if workload_name not in ALL or precision not in PRECISIONS:
            raise UsageError(
                f"--run {name}: expected a workload of {', '.join(ALL)}, a colon and a precision"
            )
        workload, config = ALL[workload_name], settings(self.options, precision)
        model: ModelConfig = ARCHITECTURES[workload.arch].from_flags(workload.flags)
        begun = time.perf_counter()
        if self.comm is None:
            chosen = choose_transport(self.world, config, model, self.notes)
            self.comm = chosen.comm
            self.notes += [f"transport: {chosen.text}"] if chosen.text else []
        stages = model.stages(config.recompute)
        module = ShardedModule(stages, self.comm, **vars(layout_config(config, model)))
        optimizer = make_optimizer(config, module, model)
        module.initialize(seed=0)
        steps = list(train(module, optimizer, workload, self.options))
        found = {"run": name, "ranks": self.world.size, "device": device.in_use().about, "notes": self.notes}
        found |= {"losses": [loss for loss, _ in steps], "norms": [norm for _, norm in steps]}
        return found | {"digest": digest(module), "seconds": time.perf_counter() - begun}


def command(world: World, arguments: Sequence[str]) -> int:
    """All runs."""
    options = world.run_on_all(lambda: make_parser().parse_args(arguments))
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
    return 0


if __name__ == "__main__":
    run("losses", command, sys.argv[1:], alone=not environment.under_launcher())
