"""Layers of your own, saved halfway and loaded again, on any number of ranks.

    mpirun -n 3 python examples/save_and_load.py

It trains half of the steps, saves, loads into a new module and trains the other half. If a folder is given,
each call trains one half. The second call may use another number of ranks, and its output is the same, digit
for digit:

    mpirun -n 3 python examples/save_and_load.py halfway
    mpirun -n 2 python examples/save_and_load.py halfway
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import zero_mpi
from zero_mpi import FULL_SHARD, Comm, GradAccum, ShardedAdamW, ShardedModule, connect
from zero_mpi.device.types import Array
from zero_mpi.launch.world import World, run
from zero_mpi.nn import Layer, Param, Stage

HALF, MICRO_BATCHES, ROWS, WIDTH = 40, 4, 16, 24  # ROWS: rows per micro-batch


class Affine(Layer):
    """Layer y = x W + b for x (B, I), with `NAME.weight` (I, O) and `NAME.bias` (O,)."""

    def __init__(self, name: str, inputs: int, outputs: int) -> None:
        self.weight, self.bias, self.shape = f"{name}.weight", f"{name}.bias", (inputs, outputs)

    def params(self) -> dict[str, Param]:
        std = self.shape[0] ** -0.5
        return {self.weight: Param(self.shape, "normal", std), self.bias: Param(self.shape[1:], "zeros")}

    def forward(self, p: Any, x: Array) -> tuple[Array, Any]:
        return x @ p[self.weight] + p[self.bias], x

    def backward(self, p: Any, saved: Any, dy: Array, g: Any) -> Array:
        g[self.weight] += saved.T @ dy
        g[self.bias] += dy.sum(axis=0)
        return dy @ p[self.weight].T


class Bend(Layer):
    """Layer y = x / sqrt(1 + x x), a curve that only needs arithmetic. It has no parameters."""

    def forward(self, p: Any, x: Array) -> tuple[Array, Any]:
        root = np.sqrt(1 + x * x)
        return x / root, root

    def backward(self, p: Any, saved: Any, dy: Array, g: Any) -> Array:
        return dy / saved**3


def make(comm: Comm) -> tuple[ShardedModule, ShardedAdamW]:
    """Return the initialized module and its optimizer."""
    stages = [
        Stage("first", Affine("first", 2, WIDTH)),
        Stage("bend", Bend()),
        Stage("second", Affine("second", WIDTH, 1)),
    ]
    module = ShardedModule(stages, comm, FULL_SHARD)
    module.initialize(seed=0)
    return module, ShardedAdamW(module, lr=2e-2, weight_decay=0.0)


def read(step: int, micro_batch: int | None) -> tuple[Array | None, Any]:
    """Return points and criterion of a micro-batch: squared error against the product of both coordinates."""
    if micro_batch is None:
        return None, None
    x = np.random.default_rng((step, micro_batch)).uniform(-1, 1, (ROWS, 2)).astype(np.float32)
    target, scale = x[:, :1] * x[:, 1:], 1 / (MICRO_BATCHES * ROWS)
    return x, lambda y: (scale * np.square(y - target, dtype=np.float64).sum(), 2 * scale * (y - target))


def train(module: ShardedModule, optimizer: ShardedAdamW, first: int) -> None:
    """Train half of the steps, beginning with number `first`, and print the losses."""
    accum = GradAccum(module, MICRO_BATCHES)
    for step in range(first, first + HALF):
        for micro_batch in accum:
            accum.accumulate(*read(step, micro_batch))
        loss = accum.total_loss()
        optimizer.step(max_norm=1.0)
        if module.comm.rank == 0 and (step + 1) % 5 == 0:
            print(f"step {step + 1} loss {loss!r}")


def both_halves(comm: Comm, folder: Path) -> None:
    """Train the first half and save it. Load it into a new module and train the second half."""
    module, optimizer = make(comm)
    train(module, optimizer, 0)
    zero_mpi.save(folder, module, optimizer)
    module, optimizer = make(comm)
    train(module, optimizer, zero_mpi.load(folder, module, optimizer))


def one_half(comm: Comm, folder: Path) -> None:
    """Train one half, from the checkpoint in the folder if there is one, and save."""
    module, optimizer = make(comm)
    there = comm.broadcast_object(folder.exists())  # rank 0 looks for the folder and tells all ranks
    train(module, optimizer, zero_mpi.load(folder, module, optimizer) if there else 0)
    zero_mpi.save(folder, module, optimizer)


def command(world: World, arguments: Sequence[str]) -> int:
    """Train, and save and load halfway. Return the exit status."""
    comm = connect()
    if arguments:
        one_half(comm, Path(arguments[0]))
        return 0
    with tempfile.TemporaryDirectory() as own:
        both_halves(comm, Path(comm.broadcast_object(own)) / "halfway")
        comm.barrier()  # rank 0 removes the folder after all ranks have read it
    return 0


if __name__ == "__main__":
    run("example", command, sys.argv[1:])
