"""An optimizer of one's own: Lion (Chen et al., 2023) shards, saves and resumes as AdamW does.

    mpirun -n 3 python examples/lion.py

Lion keeps one state, a momentum, and steps by the sign of a mix of it and the gradient. The model learns to
count. The run is saved in the middle and goes on from there again, to the same loss.
"""

import tempfile
from functools import partial
from typing import Any

import numpy as np

import zero_mpi
from zero_mpi.models import Llama

M, B, T, V = 4, 2, 16, 32  # micro-batches per step, sequences, tokens, vocabulary
SIZES = {"layers": 2, "dim": 48, "heads": 4, "context": T, "vocab_size": V}


class Lion(zero_mpi.Rule):
    type, states = "lion", ("lion.momentum",)

    def update(self, part: zero_mpi.Part, lr: float, grad_scale: float, step: int) -> None:
        p, m, g = part.parameters, part.states["lion.momentum"], part.gradients * np.float32(grad_scale)
        by_chunks = p.reshape(len(part.decay), -1)
        by_chunks *= (1 - lr * part.decay)[:, None].astype(np.float32)
        p -= np.float32(lr) * np.sign(0.9 * m + 0.1 * g)
        m[...] = 0.99 * m + 0.01 * g
        if part.low is not None:  # in bf16: what layers read
            part.low[...] = p


def read(step: int, i: int | None) -> tuple[Any, Any]:
    if i is None:
        return None, None
    text = (np.random.default_rng((step, i)).integers(V, size=(B, 1)) + np.arange(T + 1)) % V
    return text[:, :-1], partial(zero_mpi.cross_entropy, targets=text[:, 1:], scale=1 / (M * B * T))


comm = zero_mpi.connect()
module = zero_mpi.ShardedModule(Llama.from_flags(SIZES).stages(), comm)
module.initialize(seed=0)
optimizer, accum = zero_mpi.ShardedOptimizer(module, Lion(), lr=1e-3), zero_mpi.GradAccum(module, M)
folder = comm.broadcast_object(tempfile.mkdtemp() + "/lion")
for step in [*range(20), *range(10, 20)]:
    if step == 10:
        (zero_mpi.save if optimizer.steps == 10 else zero_mpi.load)(folder, module, optimizer)
    for micro_batch in accum:
        accum.accumulate(*read(step, micro_batch))
    loss = accum.total_loss()
    optimizer.step(max_norm=1.0)
    if comm.rank == 0 and step % 10 == 9:
        print(step + 1, loss)
