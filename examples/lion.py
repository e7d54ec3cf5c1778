"""An optimizer of your own: Lion (Chen et al., 2023), sharded, saved and resumed like AdamW.

    mpirun -n 3 python examples/lion.py

The model learns to count and is saved halfway. The second half is trained twice and gives the same losses.
"""

import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

import zero_mpi
from zero_mpi.launch.world import World, run
from zero_mpi.models import Llama

HALF, M, B, T, V = 20, 4, 2, 16, 32  # steps, micro-batches per step, sequences, tokens, vocabulary
SIZES = {"layers": 2, "dim": 48, "heads": 4, "context": T, "vocab_size": V}


class Lion(zero_mpi.Rule):
    type, states = "lion", ("lion.momentum",)

    def update(self, part: zero_mpi.Part, lr: float, grad_scale: float, step: int) -> None:
        p, m, g = part.parameters, part.states["lion.momentum"], part.gradients * np.float32(grad_scale)
        by_chunks = p.reshape(len(part.decay), -1)
        by_chunks *= (1 - lr * part.decay)[:, None].astype(np.float32)
        p -= np.float32(lr) * np.sign(0.9 * m + 0.1 * g)
        m[...] = 0.99 * m + 0.01 * g


def read(step: int, i: int | None) -> tuple[Any, Any]:
    if i is None:
        return None, None
    text = (np.random.default_rng((step, i)).integers(V, size=(B, 1)) + np.arange(T + 1)) % V
    return text[:, :-1], partial(zero_mpi.cross_entropy, targets=text[:, 1:], scale=1 / (M * B * T))


def command(world: World, arguments: Sequence[str]) -> int:
    comm = zero_mpi.connect()
    module = zero_mpi.ShardedModule(Llama.from_flags(SIZES).stages(), comm)
    module.initialize(0)
    optimizer, accum = zero_mpi.ShardedOptimizer(module, Lion(), lr=3e-3), zero_mpi.GradAccum(module, M)
    folder = comm.broadcast_object(tempfile.mkdtemp() + "/lion")
    for step in [*range(2 * HALF), *range(HALF, 2 * HALF)]:
        if step == HALF:
            (zero_mpi.save if optimizer.steps == HALF else zero_mpi.load)(folder, module, optimizer)
        for micro_batch in accum:
            accum.accumulate(*read(step, micro_batch))
        loss, _ = accum.total_loss(), optimizer.step(max_norm=1.0)
        print(f"step {step + 1} loss {loss!r}\n" if comm.rank == 0 and step % 4 == 3 else "", end="")
    return 0


if __name__ == "__main__":
    run("example", command, sys.argv[1:])
