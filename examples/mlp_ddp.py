"""A perceptron with one hidden layer, trained with DDP: its parameters are replicated.

    mpirun -n 3 python examples/mlp_ddp.py

Every rank computes its share of the rows in a batch. The squared error is divided by the number of rows in
the full batch, so gradients are summed over ranks and need no division.
"""

from collections.abc import Sequence

import numpy as np

from zero_mpi import DDP, ShardedAdamW, connect
from zero_mpi.device.types import Array
from zero_mpi.launch.world import World, run
from zero_mpi.nn import GELU, Linear, Stage

INPUTS, HIDDEN, STEPS, ROWS = 4, 64, 200, 96
STAGES = [
    Stage("hidden", Linear("hidden", INPUTS, HIDDEN, bias=True)),
    Stage("gelu", GELU()),
    Stage("head", Linear("head", HIDDEN, 1, bias=True)),
]


def batch(step: int) -> tuple[Array, Array]:
    """Return all rows of a step: points x (ROWS, INPUTS) and targets (ROWS, 1)."""
    x = np.random.default_rng(step).standard_normal((ROWS, INPUTS)).astype(np.float32)
    return x, np.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3]


def start(module: DDP) -> None:
    """Draw initial values, different on every rank, and then send those of rank 0 to all ranks."""
    draw = np.random.default_rng(module.comm.rank)
    module.load_state_dict(
        {
            name: (draw.standard_normal(param.shape) / np.sqrt(param.shape[-1])).astype(np.float32)
            for name, param in module.params.items()
        }
    )
    module.broadcast_parameters(root=0)


def command(world: World, arguments: Sequence[str]) -> int:
    """Train and print the loss. Return the exit status."""
    comm = connect()
    module = DDP(STAGES, comm, bucket_mb=0.01)
    start(module)
    optimizer = ShardedAdamW(module, lr=5e-3, weight_decay=0.0)
    for step in range(STEPS):
        x, target = (whole[comm.rank :: comm.size] for whole in batch(step))
        error = module.forward(x) - target
        module.backward(2.0 / ROWS * error)
        optimizer.step()
        losses = np.zeros(comm.size)  # one element per rank: all ranks add them in the same order
        losses[comm.rank] = np.square(error, dtype=np.float64).sum() / ROWS
        loss = comm.sum_vector(losses).sum()
        if comm.rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1} loss {loss:.5f}")
    return 0


if __name__ == "__main__":
    run("example", command, [])
