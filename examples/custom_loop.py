"""A training loop of your own: seven lines around a sharded llama.

    mpirun -n 3 python examples/custom_loop.py

The data is counting sequences: each token is the previous token plus the step of its sequence. The loss is
printed in full precision and is the same, digit for digit, at any number of ranks. The lines of `command`
also work in a notebook, and without MPI.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from zero_mpi import FULL_SHARD, GradAccum, ShardedAdamW, ShardedModule, connect, cross_entropy
from zero_mpi.device.types import Array
from zero_mpi.launch.world import World, run
from zero_mpi.models import Llama

VOCABULARY, CONTEXT = 32, 16
STEPS, MICRO_BATCHES, SEQUENCES = 30, 4, 4  # SEQUENCES: sequences per micro-batch
MODEL = {"vocab_size": VOCABULARY, "context": CONTEXT, "dim": 48, "layers": 2, "heads": 4, "kv_heads": 2}


def micro_batch(step: int, index: int | None) -> tuple[Array | None, Any]:
    """Return tokens and criterion of a micro-batch. They depend on step and index, but not on the rank.

    Returns (None, None) if index is None. The criterion divides by the number of tokens of the full step.
    """
    if index is None:
        return None, None
    draw = np.random.default_rng((step, index))
    first, gap = draw.integers([[0], [1]], [[VOCABULARY], [4]], size=(2, SEQUENCES))[..., None]
    text = (first + gap * np.arange(CONTEXT + 1)) % VOCABULARY
    scale = 1.0 / (MICRO_BATCHES * SEQUENCES * CONTEXT)
    return text[:, :-1], partial(cross_entropy, targets=text[:, 1:], scale=scale)


def command(world: World, arguments: Sequence[str]) -> int:
    """Train and print the loss. Return the exit status."""
    comm = connect()
    module = ShardedModule(Llama.from_flags(MODEL).stages(), comm, FULL_SHARD, prefetch=1)
    module.initialize(seed=0)
    optimizer, accumulator = ShardedAdamW(module, lr=1e-2), GradAccum(module, MICRO_BATCHES)
    for step in range(STEPS):
        for index in accumulator:
            accumulator.accumulate(*micro_batch(step, index))
        loss = accumulator.total_loss()
        norm = optimizer.step(max_norm=1.0).grad_norm
        if comm.rank == 0:
            print(f"step {step + 1} loss {loss!r} grad_norm {norm!r}")
    return 0


if __name__ == "__main__":
    run("example", command, [])
