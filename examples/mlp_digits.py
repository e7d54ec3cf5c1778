"""A sharded model that is no transformer: a perceptron with two hidden layers recognizes handwritten digits.

    mpirun -n 3 python examples/mlp_digits.py

The 1797 images of 8 x 8 pixels come with scikit-learn (`pip install 'zero-mpi[examples]'`). A fifth of them
is held out, and the last line is the accuracy on this fifth. A batch is cut into micro-batches that do not
depend on the ranks, so the output is the same, digit for digit, at any number of ranks.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from zero_mpi import (
    FULL_SHARD,
    GradAccum,
    ShardedAdamW,
    ShardedModule,
    UsageError,
    connect,
    cross_entropy,
)
from zero_mpi.device.types import Array
from zero_mpi.launch.world import World, run
from zero_mpi.nn import GELU, Chain, Linear, Stage

PIXELS, HIDDEN, CLASSES, HELD_OUT = 64, 128, 10, 360
STEPS, MICRO_BATCHES, IMAGES = 60, 4, 64  # IMAGES: images per micro-batch


def digits() -> tuple[Array, Array]:
    """Return images (N, 64) with values from 0 to 1, and their digits (N,), in a fixed random order."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError("the digits need scikit-learn: pip install 'zero-mpi[examples]'") from error
    images, shown = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(shown))
    return (images[order] / 16).astype(np.float32), shown[order].astype(np.int64)


def linear(name: str, inputs: int, outputs: int) -> Linear:
    """Return a linear layer whose initial weights keep the scale of its input."""
    return Linear(name, inputs, outputs, bias=True, std=inputs**-0.5)


def stages() -> list[Stage]:
    """Return one stage per layer, so that its parameters are gathered while the previous layer computes."""
    return [
        Stage("first", Chain(linear("first", PIXELS, HIDDEN), GELU())),
        Stage("second", Chain(linear("second", HIDDEN, HIDDEN), GELU())),
        Stage("head", linear("head", HIDDEN, CLASSES)),
    ]


def micro_batch(data: tuple[Array, Array], step: int, index: int | None) -> tuple[Array | None, Any]:
    """Return the images and the criterion of a micro-batch; (None, None) if index is None."""
    if index is None:
        return None, None
    images, shown = data
    chosen = np.random.default_rng((step, index)).integers(len(shown), size=IMAGES)
    return images[chosen], partial(cross_entropy, targets=shown[chosen], scale=1 / (MICRO_BATCHES * IMAGES))


def command(world: World, arguments: Sequence[str]) -> int:
    """Train, and then recognize the held-out images. Return the exit status."""
    comm = connect()
    images, shown = world.run_on_root(digits)  # rank 0 reads the images and sends them to all
    train, test = (images[HELD_OUT:], shown[HELD_OUT:]), (images[:HELD_OUT], shown[:HELD_OUT])
    module = ShardedModule(stages(), comm, FULL_SHARD)
    module.initialize(seed=0)
    optimizer, accumulator = ShardedAdamW(module, lr=1e-2), GradAccum(module, MICRO_BATCHES)
    for step in range(STEPS):
        for index in accumulator:
            accumulator.accumulate(*micro_batch(train, step, index))
        loss = accumulator.total_loss()
        optimizer.step(max_norm=1.0)
        if comm.rank == 0 and (step + 1) % 5 == 0:
            print(f"step {step + 1} loss {loss!r}")
    read = module.forward(test[0], training=False).argmax(axis=-1)  # collective: all ranks compute all images
    if comm.rank == 0:
        print(f"accuracy {(read == test[1]).mean():.4f} on {HELD_OUT} held-out images")
    return 0


if __name__ == "__main__":
    run("example", command, [])
