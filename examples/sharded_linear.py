"""A linear layer sharded by rows, fitted to a linear map.

    mpirun -n 3 python examples/sharded_linear.py

Three ranks own 4, 3 and 3 of the ten rows. Forward gathers the rows, multiplies, and drops them immediately;
backward gathers them again. Weights, gradients and moments of a row stay on the rank that owns it.
"""

from collections.abc import Sequence

import numpy as np

from zero_mpi import ShardedAdamW, ShardedLinear, connect
from zero_mpi.launch.world import World, run

INPUTS, OUTPUTS, STEPS, ROWS = 6, 10, 200, 48
draw = np.random.default_rng(0)
MAP = draw.standard_normal((OUTPUTS, INPUTS)).astype(np.float32)
SHIFT = draw.standard_normal(OUTPUTS).astype(np.float32)


def command(world: World, arguments: Sequence[str]) -> int:
    """Fit the layer and print the loss. Return the exit status."""
    comm = connect()
    layer = ShardedLinear(comm, INPUTS, OUTPUTS, name="map")
    layer.initialize(seed=0)
    optimizer = ShardedAdamW(layer, lr=5e-2, weight_decay=0.0)
    owned = comm.allgather_object(layer.shard_info()["map.weight"].size)
    if comm.rank == 0:
        print(f"rows by rank: {owned}")
    for step in range(STEPS):
        points = np.random.default_rng(step).standard_normal((ROWS, INPUTS)).astype(np.float32)
        x = points[comm.rank :: comm.size]
        error = layer.forward(x) - (x @ MAP.T + SHIFT)
        layer.backward(2.0 / (ROWS * OUTPUTS) * error)
        optimizer.step()
        losses = np.zeros(comm.size)  # one element per rank: all ranks add them in the same order
        losses[comm.rank] = np.square(error, dtype=np.float64).sum() / (ROWS * OUTPUTS)
        loss = comm.sum_vector(losses).sum()
        if comm.rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1} loss {loss:.2e}")
    worst = np.abs(layer.all_gather_param("map.weight") - MAP).max()
    if comm.rank == 0:
        print(f"largest error of a weight: {worst:.2e}")
    return 0


if __name__ == "__main__":
    run("example", command, [])
